"""What happens to workers costs work, never a rollout: C1, C3."""

import random

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import judge

#: More than one worker can hold.
BOTH = 40
#: The promise is five seconds beyond the lease; `rollout bench faults` measures it. This is for a
#: machine that is busy with other tests, and short beside any remedy but the lease.
ROOM_S = 15.0


def test_rollouts_of_a_killed_worker_are_run_again(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=8, name="killed", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C1")
    injections.kill_worker(deployment, seeded)
    run.open_gate()
    figures = judge(run)
    assert figures.repeated > 0
    assert max(figures.recoveries_s) < deployment.size.lease.lease_s + ROOM_S


def test_results_of_a_frozen_worker_come_too_late(deployment: Deployment, seeded: random.Random):
    run = FaultRun(deployment, groups=8, name="frozen", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C3")
    with injections.frozen_worker(deployment, seeded):
        run.open_gate()
        deployment.wait_until(lambda: run.count_lost(), what="its attempts to be given up")
    figures = judge(run)
    assert figures.repeated > 0
