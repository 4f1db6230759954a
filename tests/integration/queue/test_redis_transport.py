"""Our transports are found by the scheme of the URL; that for Redis keeps kombu's promises."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fixtures.waiting import wait_until
from kombu import Connection

from pipeline.queue import redis_transport, sqs_transport
from pipeline.queue.broker import broker_of


@pytest.fixture
def connection(redis_place, make_settings):
    broker = broker_of(make_settings(redis_place))
    with broker.connect(unacked_key="kept") as connection:
        yield connection
        with connection.channel() as channel:
            channel.client.delete("kept", "kept.index", "letters")


def receive(connection: Connection) -> Any:
    queue = connection.SimpleQueue("letters")
    queue.put("a letter")
    return queue.get(timeout=10)


def kept(connection: Connection) -> tuple[int, int]:
    client = cast("Any", connection.default_channel).client
    return client.hlen("kept"), len(client.zrange("kept.index", 0, -1))


@pytest.mark.parametrize(
    ("url", "transport"),
    [
        ("redis://127.0.0.1:1/0", redis_transport.Transport),
        ("rediss://127.0.0.1:1/0", redis_transport.Transport),
        ("redis+socket:///nowhere/redis.sock?virtual_host=0", redis_transport.Transport),
        ("sqs://key:secret@", sqs_transport.Transport),
    ],
)
def test_a_connection_has_the_transport_of_its_scheme(make_settings, url, transport):
    broker = broker_of(make_settings(broker={"url": url}))
    assert broker.connect().get_transport_cls() is transport


def test_a_message_is_kept_with_its_time_until_it_is_acknowledged(connection):
    message = receive(connection)
    assert kept(connection) == (1, 1)
    message.ack()
    assert kept(connection) == (0, 0)


def test_a_message_of_a_closed_connection_is_delivered_again(connection, redis_place):
    with Connection(
        redis_place.url, transport_options=dict(connection.transport_options)
    ) as closed:
        assert receive(closed).payload == "a letter"
    again = wait_until(
        lambda: connection.SimpleQueue("letters").get(timeout=1), 10, what="the letter again"
    )
    assert again.payload == "a letter"
    again.ack()


def test_the_commands_of_a_channel_share_a_client_of_its_present_pool(connection):
    channel = connection.default_channel
    with channel.conn_or_acquire() as first, channel.conn_or_acquire() as second:
        assert first is second
    channel._disconnect_pools()
    with channel.conn_or_acquire() as other:
        assert other is not first
        assert other.ping()
