"""A broker that answers with a refusal counts as unavailable, whatever error its driver raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import boto3
import pytest
from amqp.exceptions import MessageNacked
from botocore.exceptions import ClientError, EndpointConnectionError
from fixtures.brokers import BrokerPlace
from fixtures.messages import completion_of, heartbeat_of
from kombu.exceptions import EncodeError, OperationalError
from redis.exceptions import NoPermissionError, ResponseError

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import HEARTBEAT_QUEUE
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.completions import OutcomePublisher
from pipeline.settings import Settings

REFUSED = {"Error": {"Code": "ExpiredToken", "Message": "The security token has expired."}}


@pytest.mark.parametrize("broker_place", ["amqp"], indirect=True)
def test_a_publish_that_a_full_queue_rejects_is_an_unavailable_broker(broker: Broker):
    full = replace(
        broker,
        queue_arguments=broker.queue_arguments
        | {"x-max-length": 1, "x-overflow": "reject-publish"},
    )
    publisher = OutcomePublisher(full)

    def send_many() -> None:
        for _ in range(50):
            publisher.send_completions([completion_of()])

    with pytest.raises(QueueUnavailable) as raised:
        send_many()
    publisher.close()
    assert isinstance(raised.value.__cause__, MessageNacked)


def test_a_publish_that_sqs_refuses_is_an_unavailable_broker(
    sqs_place: BrokerPlace, make_settings: Callable[..., Settings]
):
    publisher = OutcomePublisher(broker_of(make_settings(sqs_place)))
    publisher.send_heartbeat(heartbeat_of())
    sqs = boto3.client("sqs", region_name="us-east-1", endpoint_url=sqs_place.aws["endpoint_url"])
    name = f"{sqs_place.prefix}{HEARTBEAT_QUEUE}".replace(".", "-")
    sqs.delete_queue(QueueUrl=sqs.get_queue_url(QueueName=name)["QueueUrl"])
    with pytest.raises(QueueUnavailable) as raised:
        publisher.send_heartbeat(heartbeat_of())
    assert isinstance(raised.value.__cause__, ClientError)
    # The next one declares the queue again.
    publisher.send_heartbeat(heartbeat_of())
    publisher.close()


@pytest.mark.parametrize(
    "error",
    [
        MessageNacked(),
        ClientError(REFUSED, "SendMessage"),
        EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
        ResponseError("OOM command not allowed when used memory > 'maxmemory'."),
        NoPermissionError("this user has no permissions"),
        OperationalError("no route to host"),
        ConnectionResetError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_a_driver_is_an_unavailable_broker(
    redis_place: BrokerPlace, make_settings: Callable[..., Settings], error: Exception
):
    broker = broker_of(make_settings(redis_place))
    cleaned_up: list[bool] = []
    with (
        pytest.raises(QueueUnavailable),
        broker.driver_errors(lambda: cleaned_up.append(True)),
    ):
        raise error
    assert cleaned_up


@pytest.mark.parametrize(
    "error", [EncodeError("no JSON"), ValueError("a bug"), AttributeError("a bug")]
)
def test_an_error_that_no_driver_raised_stays_as_it_is(
    redis_place: BrokerPlace, make_settings: Callable[..., Settings], error: Exception
):
    broker = broker_of(make_settings(redis_place))
    with pytest.raises(type(error)), broker.driver_errors():
        raise error
