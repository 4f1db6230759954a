"""A controller may die between any two steps: C7, C8, C9."""

from benchmarks.faults import controller, injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import MANY, judge

PLACES = (
    controller.BEFORE_PUBLISH,
    controller.HALF_PUBLISHED,
    controller.BEFORE_COMMIT,
    controller.BEFORE_ACK,
)


def test_a_controller_may_die_between_any_two_steps(deployment: Deployment):
    for member in deployment.controllers:
        deployment.fleet.retire(member)
    run = FaultRun(deployment, groups=MANY, name="dead")
    run.note_fault("C7 to C9")
    places = [f"{place}:1" for place in PLACES]
    doomed = injections.kill_controller_at(deployment, *places, timeout_s=90)
    assert [code for _, code in doomed.deaths] == [-9] * len(places)
    judge(run)
