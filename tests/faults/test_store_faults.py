"""PostgreSQL may go down under everybody: what was committed is there. C10."""

import random

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import BOTH, MANY, judge, pids


def test_services_outlive_a_store_that_stops_in_the_middle(
    deployment: Deployment, seeded: random.Random
):
    before = pids(deployment)
    run = FaultRun(deployment, groups=MANY, name="stopped", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C10")
    injections.restart_store(deployment, seeded)
    run.open_gate()
    run.wait_done(0.3)
    run.note_fault("C10")
    injections.restart_store(deployment, seeded)
    judge(run)
    assert pids(deployment) == before
