"""A broker may lose everything, or be gone: the store knows what is owed. C4, C5, C6, C18, C19."""

import random
import time
from contextlib import ExitStack

import pytest

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.runs import FaultRun
from faults.rules import BOTH, FEW, MANY, judge, pids, skip_if_not_applicable
from pipeline.settings import BrokerSettings

_NETWORK_TIMEOUT_S = BrokerSettings().network_timeout_s


def test_messages_that_the_broker_loses_are_sent_again(
    deployment: Deployment, seeded: random.Random
):
    run = FaultRun(deployment, groups=MANY, name="flushed", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C4")
    injections.lose_messages(deployment, seeded)  # requests
    run.open_gate()
    run.wait_done(0.3)
    run.note_fault("C4")
    injections.lose_messages(deployment, seeded)  # completions
    judge(run)


def test_everybody_outlives_a_broker_that_dies_and_comes_back_empty(
    deployment: Deployment, seeded: random.Random
):
    skip_if_not_applicable(deployment, "C5 broker killed, empty restart")
    before = pids(deployment)
    run = FaultRun(deployment, groups=MANY, name="emptied", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C5")
    injections.restart_broker_empty(deployment, seeded)
    run.open_gate()
    judge(run)
    assert pids(deployment) == before


def test_an_outage_of_the_broker_is_no_reason_to_try_again(
    deployment: Deployment, seeded: random.Random
):
    before = pids(deployment)
    run = FaultRun(deployment, groups=MANY, name="away", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C6")
    with injections.absent_broker(deployment):
        lost_before = run.count_lost()
        run.open_gate()  # what is done now waits in the workers
        time.sleep(2 * deployment.size.lease.lease_s)
        assert run.count_lost() == lost_before, "judged while nobody could be heard"
    figures = judge(run)
    assert pids(deployment) == before
    # What was out at the time may have to be sent again, and only that.
    assert figures.executions <= run.rollouts + deployment.size.max_in_flight
    assert max(row["attempt_no"] for row in run.evidence().rollouts) <= 5


def test_a_broker_that_answers_nobody_is_waited_for(deployment: Deployment):
    before = pids(deployment)
    run = FaultRun(deployment, groups=FEW, name="hanging", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C6")
    with injections.hanging_broker(deployment):
        run.open_gate()
        time.sleep(1.5 * deployment.size.lease.lease_s)
    judge(run)
    assert pids(deployment) == before


def test_a_broker_that_refuses_every_call_for_a_while_costs_no_rollout(
    deployment: Deployment, seeded: random.Random
):
    skip_if_not_applicable(deployment, injections.SQS_REFUSES)
    before = pids(deployment)
    run = FaultRun(deployment, groups=FEW, name="refused", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C18")
    run.open_gate()
    injections.refuse_calls(deployment, seeded)
    judge(run)
    assert pids(deployment) == before


def test_nothing_is_given_up_while_rabbitmq_blocks_publishers(deployment: Deployment):
    if deployment.broker.name != "rabbitmq":
        pytest.skip("only RabbitMQ has alarms")
    before = pids(deployment)
    run = FaultRun(deployment, groups=MANY, name="alarm", gated=True)
    run.wait_running(BOTH)
    run.note_fault("C19")
    lease_s = deployment.size.lease.lease_s
    with ExitStack() as disk:
        with injections.alarm(deployment, "memory"):
            run.open_gate()  # finished attempts now wait in the workers
            # Longer than three leases, and than a publisher waits for one answer.
            time.sleep(max(3 * lease_s, _NETWORK_TIMEOUT_S + 3))
            assert run.count_lost() == 0, "given up while no worker could be heard"
            disk.enter_context(injections.alarm(deployment, "disk"))
        time.sleep(2 * lease_s)
        assert not run.is_done(), "the disk alarm blocked no publisher"
        assert run.count_lost() == 0, "given up during the disk alarm"
    judge(run)
    assert run.count_lost() == 0, "given up although its worker was only blocked"
    assert pids(deployment) == before
