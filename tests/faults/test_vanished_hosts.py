"""A host vanishes without a word: every client notices in time, and works again afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import boto3
import pytest
from fixtures.brokers import BrokerPlace
from fixtures.cut_link import CutLink
from fixtures.messages import request_of
from fixtures.waiting import wait_until
from sqlalchemy import Engine, text

from pipeline.contract.errors import ServiceUnavailable
from pipeline.contract.messages import Heartbeat
from pipeline.limits.store import LimitStore
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import OutcomeConsumer, OutcomePublisher
from pipeline.queue.payloads import open_payloads
from pipeline.queue.requests import RequestPublisher
from pipeline.store.engine import WORK_CHANNEL, Listener, notify, open_engine, transact

TIMEOUTS = {"connect_timeout_s": 2, "network_timeout_s": 2}
#: What a client may take: its timeout, attempts to connect again, a busy machine.
BOUND_S = 25.0
HEARTBEAT = Heartbeat(worker_id="w", sequence=0)


@pytest.fixture
def link() -> Iterator[CutLink]:
    link = CutLink()
    yield link
    link.close()


@dataclass
class Client:
    """A client: `use` works, or raises where its server is away; `outage` is its first error."""

    name: str
    use: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    outage: list[BaseException] = field(default_factory=list)

    def use_until_it_fails(self) -> None:
        until = time.monotonic() + BOUND_S
        while not self.outage and time.monotonic() < until:
            try:
                self.use()
            except Exception as error:
                self.outage.append(error)

    def works(self) -> bool:
        try:
            self.use()
        except ServiceUnavailable:
            return False
        return True


@pytest.fixture
def places(
    link: CutLink, redis_url: str, amqp_url: str, aws_url: str, amqp_place: BrokerPlace
) -> dict[str, BrokerPlace]:
    """Return each broker, as it is reached over the link."""
    parts = urlsplit(redis_url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0]
    redis_port = link.relay(parts.path)
    amqp = urlsplit(amqp_url)
    amqp_port = link.relay((amqp.hostname or "127.0.0.1", amqp.port or 5672))
    user = f"{amqp.username}:{amqp.password}"
    aws = urlsplit(aws_url)
    aws_port = link.relay((str(aws.hostname), int(aws.port or 0)))
    endpoint = f"http://{link.host}:{aws_port}"
    return {
        "redis": BrokerPlace("redis", f"redis://{link.host}:{redis_port}/{database}"),
        "amqp": BrokerPlace(
            "amqp",
            f"amqp://{user}@{link.host}:{amqp_port}{amqp.path}",
            prefix=amqp_place.prefix,
        ),
        "sqs": BrokerPlace("sqs", "sqs://testing:testing@", {"endpoint_url": endpoint}),
    }


def over(link: CutLink, engine: Engine) -> Engine:
    """Return an engine that reaches the same database over the link."""
    folder, port = str(engine.url.query["host"]), engine.url.query.get("port", engine.url.port)
    relay = link.relay(f"{folder}/.s.PGSQL.{port or 5432}")
    url = engine.url.set(host=link.host, port=relay, query={})
    return open_engine(url.render_as_string(hide_password=False), **TIMEOUTS)


def broker_clients(place: BrokerPlace, make_settings: Any) -> Iterator[Client]:
    broker = broker_of(make_settings(place, broker=TIMEOUTS))
    publisher, consumer = OutcomePublisher(broker), OutcomeConsumer(broker)
    requests = RequestPublisher(broker, expires_s=60)

    def receive() -> None:
        delivery = consumer.receive(most=8, linger_s=0.01, timeout_s=0.2)
        consumer.ack(delivery)

    def request() -> None:
        requests.publish([request_of()], queue="rollouts")
        # A request is not confirmed: the connection fails some time after the link.
        time.sleep(0.1)

    yield Client(
        f"{place.kind} outcomes", lambda: publisher.send_heartbeat(HEARTBEAT), publisher.close
    )
    yield Client(f"{place.kind} consumer", receive, consumer.close)
    yield Client(f"{place.kind} requests", request, requests.close)


def other_clients(place: BrokerPlace, aws: dict[str, Any], store: Engine, make_settings: Any):
    def limits() -> None:
        async def show() -> None:
            store = LimitStore.connect(place.url, prefix=place.prefix)
            try:
                await store.show()
            finally:
                await store.close()

        asyncio.run(show())

    bucket = f"b{uuid4().hex}"
    boto3.client("s3", region_name="us-east-1", **aws).create_bucket(Bucket=bucket)
    settings = make_settings(aws=aws, payloads={"url": f"s3://{bucket}", **TIMEOUTS})
    payloads = open_payloads(settings)
    yield Client("limits", limits)
    yield Client("payloads", lambda: payloads.put("a/b", b"data"))
    yield Client(
        "store", lambda: transact(store, lambda c: c.execute(text("SELECT 1"))), store.dispose
    )


def test_clients_notice_a_vanished_host_and_work_again_when_it_is_back(
    link: CutLink, places: dict[str, BrokerPlace], engine: Engine, make_settings: Any
):
    store = over(link, engine)
    clients = [each for place in places.values() for each in broker_clients(place, make_settings)]
    clients += other_clients(places["redis"], places["sqs"].aws, store, make_settings)
    sleep = text("SELECT pg_sleep(300)")
    query = Client("query", lambda: transact(store, lambda c: c.execute(sleep)))
    for client in clients:
        client.use()
    threads = [threading.Thread(target=query.use_until_it_fails, daemon=True)]
    threads[0].start()
    asked = text("SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(300)'")
    wait_until(lambda: transact(engine, lambda c: c.execute(asked).scalar_one()), what="a query")
    link.cut()
    threads += [threading.Thread(target=c.use_until_it_fails, daemon=True) for c in clients]
    for thread in threads[1:]:
        thread.start()
    until = time.monotonic() + BOUND_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    unaware = [client.name for client in (query, *clients) if not client.outage]
    link.mend()
    assert unaware == []
    for client in (query, *clients):
        assert isinstance(client.outage[0], ServiceUnavailable), client
    for client in clients:
        wait_until(client.works, 30, what=client.name)
        client.close()


def test_a_listener_notices_that_its_connection_was_cut(link: CutLink, engine: Engine):
    listener = Listener(over(link, engine), WORK_CHANNEL)
    assert listener.hear(1) is None
    transact(engine, lambda c: notify(c, WORK_CHANNEL, "before"))
    assert listener.hear(10) == ["before"]
    link.cut()
    until = time.monotonic() + 6
    while time.monotonic() < until:
        assert not listener.hear(0.2)
    link.mend()
    wait_until(lambda: listener.hear(0.2) is None, 30, what="a new connection")
    transact(engine, lambda c: notify(c, WORK_CHANNEL, "after"))
    assert listener.hear(10) == ["after"]
    listener.close()


def test_connections_that_became_read_only_are_replaced(database_url: str):
    engine = open_engine(database_url, pool_size=1)
    listener = Listener(engine, WORK_CHANNEL)
    assert listener.hear(0) is None
    with engine.connect() as connection:  # as the connections to an old primary are
        connection.execute(text("SET default_transaction_read_only = on"))
        connection.commit()
    written = transact(engine, lambda c: c.execute(text("CREATE TABLE t AS SELECT 1")).rowcount)
    assert written == 1
    assert listener.hear(0) is None, "the listener connects again too"
    transact(engine, lambda c: c.execute(text("DROP TABLE t")))
    listener.close()
    engine.dispose()


def test_idle_publishers_promise_no_heartbeats(amqp_place: BrokerPlace, make_settings: Any):
    broker = broker_of(make_settings(amqp_place))
    publisher = RequestPublisher(broker, expires_s=60)
    with publisher._app.connection_for_write() as connection:
        connection.connect()
        assert connection.connection.heartbeat == 0
    publisher.close()
    with broker.connect(heartbeats=True) as connection:
        connection.connect()
        assert connection.connection is not None
        assert connection.connection.heartbeat == 10
