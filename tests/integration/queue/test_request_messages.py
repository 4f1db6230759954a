"""Requests on every broker: Celery messages that a person can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.messages import request_of
from fixtures.waiting import wait_until
from kombu import Connection, Message

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import RolloutRequest, parse_message
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.requests import RequestPublisher


@pytest.fixture
def publisher(broker: Broker) -> Iterator[RequestPublisher]:
    publisher = RequestPublisher(broker, expires_s=600)
    yield publisher
    publisher.close()


@pytest.fixture
def connection(broker: Broker) -> Iterator[Connection]:
    with broker.connect() as connection:
        yield connection


def take(broker: Broker, connection: Connection, count: int, queue: str = "rollouts") -> list[Any]:
    """Take messages from a queue as any client would."""
    taken: list[Message] = []
    bound = broker.queue(queue).bind(connection.default_channel)
    bound.declare()

    def enough() -> bool:
        message = bound.get(no_ack=False, accept=["json"])
        if message is not None:
            message.ack()
            taken.append(message)
        return len(taken) >= count

    wait_until(enough, 20, what=f"{count} messages", seen=lambda: len(taken))
    return taken


def test_a_request_is_a_celery_message_with_readable_names(broker, publisher, connection):
    request = request_of(2)
    publisher.publish([request], queue="rollouts")
    (message,) = take(broker, connection, 1)
    headers = message.headers
    assert headers["task"] == "rollout.run"
    assert headers["id"] == "math7-g000013-r2-a1"
    assert headers["argsrepr"] == "run=math7 group=g000013 rollout=3/8 policy=12"
    assert headers["kwargsrepr"] == ""
    (argument,), keywords, _ = message.payload
    assert keywords == {}
    assert parse_message(RolloutRequest, argument) == request


def test_what_fits_no_message_is_left_out_and_its_neighbours_are_sent(
    broker, publisher, connection
):
    most = broker.most_bytes or 2**20
    small, fitting, large = (
        request_of(index, prompt={"prompt": "ä" * ((size - 1000) // 6)})
        for index, size in enumerate((2000, most, most + 10_000))
    )
    left_out = publisher.publish([large, small, fitting], queue="rollouts")
    assert left_out == ([large] if broker.most_bytes else [])
    taken = take(broker, connection, 3 - len(left_out))
    assert {small.label, fitting.label} <= {message.headers["id"] for message in taken}


def test_no_request_names_a_time_that_a_wrong_clock_could_misread(broker, publisher, connection):
    publisher.publish([request_of()], queue="rollouts")
    (message,) = take(broker, connection, 1)
    assert message.headers["expires"] is None
    assert "expiration" not in message.properties


@pytest.mark.parametrize("broker_place", ["sqs"], indirect=True)
def test_requests_go_to_sqs_in_calls_of_ten_and_of_no_more_than_it_takes(
    broker, publisher, connection
):
    sizes: list[int] = []
    with publisher._app.producer_pool.acquire(block=True) as producer:
        events = producer.channel.sqs().meta.events
    events.register(
        "provide-client-params.sqs.SendMessageBatch",
        lambda params, **_: sizes.append(len(params["Entries"])),
    )
    small = [request_of(index) for index in range(25)]
    publisher.publish(small, queue="rollouts")
    assert sorted(sizes) == [5, 10, 10]
    sizes.clear()
    large = [request_of(index, prompt={"prompt": "x" * 200_000}) for index in range(25, 30)]
    publisher.publish(large, queue="rollouts")
    assert sum(sizes) == 5
    assert max(sizes) < 5
    taken = take(broker, connection, 30)
    assert {message.headers["id"] for message in taken} == {
        request.label for request in (*small, *large)
    }


def test_what_defaults_say_is_not_sent(broker, publisher, connection):
    publisher.publish([request_of()], queue="rollouts")
    (message,) = take(broker, connection, 1)
    sent = json.loads(message.payload[0][0])
    assert "sampling" not in sent
    assert "base_url" not in sent


def test_a_batch_arrives_whole_and_is_counted(broker, publisher, connection):
    requests = [request_of(index) for index in range(20)]
    publisher.publish(requests, queue="rollouts")
    wait_until(lambda: broker.depth(connection, "rollouts") == 20, 10)
    taken = take(broker, connection, 20)
    assert {message.headers["id"] for message in taken} == {request.label for request in requests}
    assert broker.depth(connection, "rollouts") == 0


def test_queues_do_not_mix(broker, publisher, connection):
    publisher.publish([request_of(1)], queue="rollouts")
    publisher.publish([request_of(2)], queue="gpu")
    (message,) = take(broker, connection, 1, queue="gpu")
    assert message.headers["id"] == request_of(2).label
    assert broker.depth(connection, "rollouts") == 1


def test_deployments_on_one_broker_do_not_mix(broker_place, make_settings):
    mine, theirs = (
        broker_of(make_settings(BrokerPlace(broker_place.kind, broker_place.url, broker_place.aws)))
        for _ in range(2)
    )
    publisher = RequestPublisher(mine, expires_s=60)
    publisher.publish([request_of()], queue="rollouts")
    publisher.close()
    with mine.connect() as own, theirs.connect() as other:
        wait_until(lambda: mine.depth(own, "rollouts") == 1, 10)
        assert theirs.depth(other, "rollouts") == 0


def test_an_empty_queue_that_nobody_declared_has_no_depth(broker, connection):
    assert broker.depth(connection, "rollouts") == 0


AWAY = {
    "redis": BrokerPlace("redis", "redis://me:hunter2@127.0.0.1:1/0"),
    "amqp": BrokerPlace("amqp", "amqp://me:hunter2@127.0.0.1:1//"),
    "sqs": BrokerPlace("sqs", "sqs://me:hunter2@", {"endpoint_url": "http://127.0.0.1:1"}),
}


@pytest.mark.parametrize("kind", AWAY)
def test_a_broker_that_does_not_answer_is_named_without_its_password(kind, make_settings):
    broker = broker_of(make_settings(AWAY[kind], broker={"connect_timeout_s": 0.5}))
    publisher = RequestPublisher(broker, expires_s=60)
    with pytest.raises(QueueUnavailable, match=r"127\.0\.0\.1:1.*ROLLOUT_BROKER__URL") as caught:
        publisher.publish([request_of()], queue="rollouts")
    assert "hunter2" not in str(caught.value)
    with broker.connect() as connection, pytest.raises(QueueUnavailable):
        broker.depth(connection, "rollouts")
    publisher.close()
