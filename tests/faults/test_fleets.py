"""Two of each service work on the same run and never get in each other's way. C17."""

import random

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import BOTH, MANY, judge


def test_two_of_each_service_decide_each_rollout_once(
    deployment: Deployment, seeded: random.Random
):
    deployment.add_controller()
    deployment.wait_ready()
    run = FaultRun(deployment, groups=MANY, name="pair", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C1")
    injections.kill_worker(deployment, seeded)
    run.open_gate()
    judge(run)
    assert run.count_lost() > 0, "both reconcilers had something to decide"
