"""Two of each service work on the same run and never get in each other's way. C17."""

import random

from rules import judge

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun


def test_two_of_each_service_decide_each_rollout_once(
    deployment: Deployment, seeded: random.Random
):
    for name in ("dispatcher", "collector", "reconciler"):
        deployment.add_controller(name)
    run = FaultRun(deployment, groups=32, name="pair")
    run.wait_done(0.2)
    run.note_fault("C1")
    injections.kill_worker(deployment, seeded)
    judge(run)
