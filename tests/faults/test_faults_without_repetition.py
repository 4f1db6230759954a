"""Faults that must not cost any work, while no lease can end: C2, C12, C16."""

import random
import time
from collections import Counter

from benchmarks.faults import injections, worker
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import BOTH, MANY, judge

#: However busy the machine is: what is repeated, is repeated because of the fault.
PATIENT = {"ROLLOUT_LEASE__LEASE_S": "300"}
WRONG_CLOCKS = ("900", "-900")


def test_wrong_clocks_garbage_and_a_stop_cost_no_work(
    deployment: Deployment, seeded: random.Random
):
    replace_members(deployment)
    started = time.time()
    run = FaultRun(deployment, groups=MANY, name="strange", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C12")
    before = dead_letters(run)
    injections.send_garbage(deployment, seeded)
    run.note_fault("C2")
    leaving = injections.replace_worker(deployment, seeded)
    run.open_gate()
    assert leaving.process.wait(120) == 0
    figures = judge(run)
    assert (figures.repeated, figures.failed) == (0, 0)
    garbage = len(injections.GARBAGE)
    expected = {
        "completion": garbage,
        "heartbeat": garbage,
        "request": len(injections.NO_REQUESTS),
    }
    deployment.wait_until(lambda: dead_letters(run) - before == expected, what=f"{expected}")
    query = "SELECT min(started_at), max(ended_at) FROM attempts WHERE run_id = :run_id"
    ((first, last),) = run.rows(query)
    assert started - 1 < first.timestamp() < last.timestamp() < time.time() + 1


def replace_members(deployment: Deployment) -> None:
    """A controller with patience, and workers whose clocks are wrong by a quarter of an hour."""
    before = deployment.controllers + deployment.workers
    deployment.add_controller(PATIENT)
    for skew_s in WRONG_CLOCKS:
        deployment.add_worker({worker.SKEW_VARIABLE: skew_s})
    for member in before:
        deployment.fleet.retire(member)
    deployment.wait_ready()


def dead_letters(run: FaultRun) -> Counter[str]:
    query = "SELECT kind, count(*) FROM dead_letters WHERE kind <> 'rollout' GROUP BY kind"
    return Counter({kind: count for kind, count in run.rows(query)})
