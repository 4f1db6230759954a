"""A broker may lose everything, or be gone: the store knows what is owed. C4, C5, C6."""

import random

from rules import judge, pids

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun


def test_messages_that_the_broker_loses_are_sent_again(
    deployment: Deployment, seeded: random.Random
):
    # More than fit into the workers: requests are queued, in flight, and completions under way.
    run = FaultRun(deployment, groups=16, name="flushed")
    for share in (0.1, 0.5):
        run.wait_done(share)
        run.note_fault("C4")
        injections.lose_messages(deployment, seeded)
    judge(run)


def test_everybody_outlives_a_broker_that_dies_and_comes_back_empty(
    deployment: Deployment, seeded: random.Random
):
    before = pids(deployment)
    run = FaultRun(deployment, groups=16, name="emptied")
    run.wait_running(20)
    run.note_fault("C5")
    injections.restart_broker_empty(deployment, seeded)
    judge(run)
    assert pids(deployment) == before


def test_an_outage_of_the_broker_is_no_reason_to_try_again(
    deployment: Deployment, seeded: random.Random
):
    before = pids(deployment)
    run = FaultRun(deployment, groups=16, name="away")
    run.wait_done(0.2)
    run.note_fault("C6")
    lost_before = lost(run)
    injections.broker_away(deployment, seeded)
    assert lost(run) == lost_before, "judged while nobody could be heard"
    figures = judge(run)
    assert pids(deployment) == before
    # What was out at the time may have to be sent again, and only that.
    assert figures.executions <= run.rollouts + deployment.size.max_in_flight
    assert max(row["attempt_no"] for row in run.evidence().rollouts) <= 3


def test_a_broker_that_answers_nobody_is_waited_for(deployment: Deployment, seeded: random.Random):
    before = pids(deployment)
    run = FaultRun(deployment, groups=8, name="hanging")
    run.wait_done(0.1)
    run.note_fault("C6")
    injections.broker_hangs(deployment, seeded)
    judge(run)
    assert pids(deployment) == before


def lost(run: FaultRun) -> int:
    query = "SELECT count(*) FROM attempts WHERE run_id = :run_id AND state = 'lost'"
    return run.rows(query)[0][0]
