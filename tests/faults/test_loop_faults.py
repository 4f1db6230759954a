"""Code that blocks a worker's loop: the watchdog tells, the lease decides. C13."""

from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import judge


def test_a_blocked_loop_is_reported_and_its_rollouts_are_run_elsewhere(deployment: Deployment):
    blocked_s = 2 * deployment.size.lease.lease_s
    run = FaultRun(
        deployment, groups=4, name="blocked", harms={1: {"harm": "block_loop", "harm_s": blocked_s}}
    )
    run.note_fault("C13")
    figures = judge(run)
    assert figures.failed == 0
    log = deployment.fleet.logs("worker")
    assert "The event loop has not answered" in log
    assert "plugin.py" in log, "the watchdog shows where it blocks"
