"""What happens to workers costs work, never a rollout: C1, C2, C3, C16."""

import random
import time

from rules import judge

from benchmarks.faults import injections, worker
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun


def test_rollouts_of_killed_workers_are_run_again(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=8, name="killed")
    for share in (0.1, 0.5):
        run.wait_done(share)
        run.note_fault("C1")
        injections.kill_worker(deployment, seeded)
    figures = judge(run)
    assert figures.repeated > 0
    # From the first kill to the last outcome: a second kill may hit the same rollout again.
    lease_s = deployment.size.lease.lease_s
    assert max(figures.recoveries_s) < 2 * lease_s + 15


def test_a_stopped_worker_finishes_what_it_has(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=8, name="drained")
    run.wait_running(20)
    run.note_fault("C2")
    leaving = injections.replace_worker(deployment, seeded)
    assert leaving.process.wait(60) == 0
    figures = judge(run)
    assert figures.repeated == 0
    assert figures.tokens_wasted == 0


def test_results_of_a_frozen_worker_come_too_late(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=8, name="frozen")
    run.wait_running(20)
    run.note_fault("C3")
    injections.freeze_worker(deployment, seeded)
    figures = judge(run)
    assert figures.repeated > 0


def test_a_wrong_clock_of_a_worker_changes_nothing(deployment: Deployment):
    skewed = [
        deployment.add_worker(once={worker.SKEW_VARIABLE: str(skew_s)}) for skew_s in (300, -300)
    ]
    for member in deployment.workers:
        if member not in skewed:
            deployment.fleet.retire(member)
    deployment.wait_ready()
    started = time.time()
    run = FaultRun(deployment, groups=8, name="skewed")
    figures = judge(run)
    assert figures.repeated == 0
    assert figures.failed == 0
    (early,) = run.rows(
        "SELECT min(started_at), max(ended_at) FROM attempts WHERE run_id = :run_id"
    )
    assert abs(early[0].timestamp() - started) < 60
    assert abs(early[1].timestamp() - time.time()) < 60
