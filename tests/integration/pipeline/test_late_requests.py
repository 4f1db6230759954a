"""Requests that wait for the broker, or on it: nothing stale is published or executed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.deployment import VISIBILITY_S
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from sqlalchemy import Engine

from pipeline.contract.errors import QueueUnavailable
from pipeline.dispatcher import Dispatcher
from pipeline.queue import broker as broker_module
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.requests import RequestPublisher

#: The request's age at which SQS drops it, and the lease of an attempt.
EXPIRES_S, LEASE_S = 2, 4


class UnsteadyPublisher(RequestPublisher):
    """Publishes, unless its broker is said to be away."""

    is_away = True

    def publish(self, requests: Any, *, queue: str) -> Any:
        if self.is_away:
            raise QueueUnavailable("The broker is away.", remedy="Wait.")
        return super().publish(requests, queue=queue)


@pytest.fixture
def settings(redis_place: BrokerPlace, make_settings: Callable[..., Any]) -> Any:
    return make_settings(redis_place, dispatch={"batch_size": 4})


@pytest.fixture
def broker(settings: Any) -> Broker:
    return broker_of(settings)


@pytest.fixture
def publisher(broker: Broker) -> UnsteadyPublisher:
    return UnsteadyPublisher(broker, expires_s=60)


@pytest.fixture
def dispatcher(engine: Engine, publisher: UnsteadyPublisher, settings: Any) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(engine, publisher, settings)
    yield dispatcher
    dispatcher.close()


def waiting(broker: Broker) -> int:
    with broker.connect() as connection:
        return broker.depth(connection, "rollouts")


def test_attempts_that_ended_while_the_broker_was_away_are_not_published(
    engine, broker, publisher, dispatcher
):
    story = StoredRun(engine, n=4)
    with pytest.raises(QueueUnavailable):
        dispatcher.step()
    given_up, started, *others = dispatcher._unpublished[0].requests
    story.record(story.lost(given_up))
    story.beat(started)
    publisher.is_away = False
    dispatcher._publish()
    assert waiting(broker) == len(others) == 2


def test_a_request_that_waited_for_the_broker_has_its_whole_lease_before_it(
    engine, publisher, dispatcher
):
    story = StoredRun(engine, n=2)
    with pytest.raises(QueueUnavailable):
        dispatcher.step()
    (before,) = story.rows("SELECT min(lease_until) AS at FROM attempts")
    publisher.is_away = False
    dispatcher._publish()
    (after,) = story.rows("SELECT min(lease_until) AS at FROM attempts")
    assert after["at"] > before["at"]


def test_no_more_than_a_batch_is_claimed_before_the_broker_confirms(engine, dispatcher):
    stories = [StoredRun(engine, n=8) for _ in range(3)]
    with pytest.raises(QueueUnavailable):
        dispatcher.step()
    with pytest.raises(QueueUnavailable):
        dispatcher.step()
    assert sum(story.states().get("dispatched", 0) for story in stories) == 4


@pytest.mark.parametrize("broker_place", ["sqs"], indirect=True)
def test_a_stale_request_is_dropped_by_the_clock_of_sqs_and_runs_once(
    deploy, broker_place, monkeypatch
):
    # SQS refuses to make a queue again with another visibility timeout than that of the processes.
    monkeypatch.setattr(broker_module, "_VISIBILITY_S", VISIBILITY_S)
    deployment = deploy(
        broker_place,
        dispatch={"request_expires_s": EXPIRES_S},
        lease={"heartbeat_s": 0.5, "lease_s": LEASE_S, "grace_s": 1.5, "poll_s": 0.2},
    )
    dispatcher = deployment.start_controller("dispatcher")
    deployment.submit(3)
    wait_until(lambda: waiting(broker_of(deployment.settings)) == 3, what="published requests")
    # A worker that died had received one of them; its second delivery is dropped as well.
    with broker_of(deployment.settings).connect() as connection:
        channel: Any = connection.default_channel
        url = channel._new_queue("rollouts")
        received = channel.sqs().receive_message(QueueUrl=url, VisibilityTimeout=1)
    assert len(received["Messages"]) == 1
    dispatcher.send(signal.SIGTERM)
    dispatcher.wait_end()
    time.sleep(EXPIRES_S + 0.5)
    deployment.start_worker()
    deployment.start_controller()
    deployment.gate.touch()
    deployment.wait_states({"succeeded": 3})
    assert len(deployment.said("started")) == 3
    assert {row["n"] for row in deployment.rows("SELECT attempt_no AS n FROM rollouts")} == {2}
    wait_until(lambda: waiting(broker_of(deployment.settings)) == 0, what="an empty queue")
