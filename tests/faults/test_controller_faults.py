"""A controller may die between any two steps: C7, C8, C9."""

import random

import pytest
from rules import judge

from benchmarks.faults import controller, injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        pytest.param(controller.BEFORE_ACK, 2, id="collector-between-commit-and-ack"),
        pytest.param(controller.BEFORE_COMMIT, 2, id="collector-before-commit"),
        pytest.param(controller.BEFORE_PUBLISH, 1, id="dispatcher-between-commit-and-publish"),
        pytest.param(controller.HALF_PUBLISHED, 1, id="dispatcher-half-way"),
    ],
)
def test_a_controller_may_die_anywhere(
    deployment: Deployment, seeded: random.Random, place: str, nth: int
):
    for member in deployment.controllers:
        deployment.fleet.retire(member)
    run = FaultRun(deployment, groups=8, name="dead")
    run.note_fault(place)
    doomed = injections.kill_controller_at(deployment, place, nth)
    assert [code for _, code in doomed.deaths] == [-9]
    figures = judge(run)
    assert figures.accepted_twice == 0
