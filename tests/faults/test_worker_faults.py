"""What happens to workers costs work, never a rollout: C1, C3."""

import random

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.fleet import Member
from benchmarks.faults.runs import FaultRun
from faults.rules import BOTH, FEW, PATIENCE_S, judge

#: The promise is five seconds beyond the lease; `python -m benchmarks faults` measures it. This is
#: for a machine that is busy with other tests, and short beside any remedy but the lease.
ROOM_S = 15.0


def test_rollouts_of_a_killed_worker_are_run_again(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=FEW, name="killed", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C1")
    injections.kill_worker(deployment, seeded)
    run.open_gate()
    figures = judge(run)
    assert figures.repeated > 0
    assert max(figures.recoveries_s) < deployment.size.lease.lease_s + ROOM_S


def test_results_of_a_frozen_worker_come_too_late(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=FEW, name="frozen", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C3")
    with injections.frozen_worker(deployment, seeded) as frozen:
        run.open_gate()
        run.wait_terminal(timeout_s=PATIENCE_S)
    # It still has what was given to others meanwhile, and says so.
    deployment.wait_until(lambda: held_by(run, frozen) == 0, what="the frozen one to let go")
    figures = judge(run)
    assert figures.repeated > 0


def held_by(run: FaultRun, worker: Member) -> int | None:
    query = "SELECT in_flight FROM processes WHERE process_id LIKE :pid"
    return next((row.in_flight for row in run.rows(query, pid=f"%-{worker.process.pid}-%")), None)
