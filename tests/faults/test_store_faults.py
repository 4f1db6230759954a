"""PostgreSQL may go down under everybody: what was committed is there. C10."""

import random

from rules import judge, pids

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun


def test_services_outlive_a_store_that_stops_in_the_middle(
    deployment: Deployment, seeded: random.Random
):
    before = pids(deployment)
    run = FaultRun(deployment, groups=16, name="stopped")
    for share in (0.1, 0.4):
        run.wait_done(share)
        run.note_fault("C10")
        injections.restart_store(deployment, seeded)
    judge(run)
    assert pids(deployment) == before
