"""TLS to Redis, RabbitMQ and PostgreSQL: every connection uses it, and none trusts a stranger."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from fixtures.messages import completion_of, request_of
from fixtures.tls import TlsFront, make_certificate
from fixtures.waiting import wait_until
from sqlalchemy import make_url, text

from pipeline.contract.errors import QueueUnavailable, ServiceUnavailable, StoreUnavailable
from pipeline.limits.settings import LimitSettings
from pipeline.limits.store import LimitStore
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import OutcomeConsumer, OutcomePublisher
from pipeline.queue.requests import RequestPublisher
from pipeline.settings import Settings
from pipeline.store.engine import READY_CHANNEL, Listener, notify, open_engine, transact

#: py-amqp drops the socket of a handshake that failed without closing it.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

ENDPOINT = "http://127.0.0.1:9/v1"
FrontMaker = Callable[..., TlsFront]


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """Certificates, each its own authority: a server's, a client's, and one for another host."""
    stranger = make_certificate(tmp_path, "stranger", address="192.0.2.1")
    return {name: make_certificate(tmp_path, name) for name in ("server", "client")} | {
        "stranger": stranger
    }


@pytest.fixture
def front() -> Iterator[FrontMaker]:
    made: list[TlsFront] = []

    def make(*args: Any, **options: Any) -> TlsFront:
        made.append(TlsFront(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=["redis", "amqp"])
def behind(request: pytest.FixtureRequest) -> tuple[str, Any, str]:
    """A broker without TLS: the scheme it has with TLS, where it is, and the rest of its URL."""
    place = request.getfixturevalue(f"{request.param}_place")
    if request.param == "redis":
        path = make_url(place.url.replace("redis+socket://", "redis://h")).database or ""
        return "rediss", "/" + path.partition("?")[0], "127.0.0.1:{port}/0"
    parts = urlsplit(place.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 5672)
    netloc = f"{parts.username}:{parts.password}@127.0.0.1:{{port}}"
    return "amqps", address, urlunsplit(("", netloc, parts.path, "", "")).removeprefix("//")


def broker_settings(
    make_settings: Callable[..., Settings], behind: tuple[str, Any, str], port: int, **tls: Any
) -> Settings:
    scheme, _, rest = behind
    url = f"{scheme}://{rest.format(port=port)}"
    return make_settings(
        broker={"url": url, "prefix": f"tls{port}-", "connect_timeout_s": 3, **tls}
    )


def send_and_receive(settings: Settings) -> None:
    """Use every kind of connection that there is to a broker."""
    broker = broker_of(settings)
    outcomes, consumer = OutcomePublisher(broker), OutcomeConsumer(broker)
    requests = RequestPublisher(broker, expires_s=60)
    try:
        outcomes.send_completions([completion_of(1)])
        requests.publish([request_of(1)], queue="rollouts")
        requests.stop_attempts(["x"])
        come = wait_until(
            lambda: consumer.receive(most=1, linger_s=0.01, timeout_s=0.5).completions, 20
        )
        assert come == [completion_of(1)]
        with broker.connect() as connection:
            assert broker.depth(connection, "rollouts") == 1
            for name in ("rollouts", "rollout.completions", "rollout.heartbeats"):
                broker.queue(name).bind(connection.default_channel).delete()
    finally:
        consumer.close()
        outcomes.close()
        requests.close()


def use_limits(settings: Settings) -> list[Any]:
    async def run() -> list[Any]:
        assert settings.limits_redis_url is not None
        store = LimitStore.connect(settings.limits_redis_url, prefix=settings.limits_prefix)
        try:
            await store.set(ENDPOINT, "m", LimitSettings(requests_per_minute=60))
            return await store.show()
        finally:
            await store.close()

    return asyncio.run(run())


def test_all_that_goes_to_a_broker_goes_by_tls_with_our_certificate(
    make_settings, behind, front, files
):
    door = front(behind[1], files["server"], clients=files["client"][0])
    tls = {
        "tls_ca_file": files["server"][0],
        "tls_cert_file": files["client"][0],
        "tls_key_file": files["client"][1],
    }
    settings = broker_settings(make_settings, behind, door.port, **tls)
    send_and_receive(settings)
    assert door.passed_on >= 3
    if behind[0] == "rediss":
        (row,) = use_limits(settings)
        assert row.settings.requests_per_minute == 60


@pytest.mark.parametrize("door_of", ["server", "stranger"])
def test_a_broker_with_another_certificate_is_told_nothing(
    make_settings, behind, front, files, door_of
):
    """One of an authority we do not know, and one of a known authority for another host."""
    door = front(behind[1], files[door_of])
    known = files["client" if door_of == "server" else "stranger"][0]
    settings = broker_settings(make_settings, behind, door.port, tls_ca_file=known)
    publisher = OutcomePublisher(broker_of(settings))
    with pytest.raises(QueueUnavailable, match=r"(?i)certificate"):
        publisher.send_completions([completion_of(1)])
    if behind[0] == "rediss":
        with pytest.raises(ServiceUnavailable, match=r"(?i)certificate"):
            use_limits(settings)
    assert door.passed_on == 0


def test_a_broker_that_wants_our_certificate_gets_no_word_without_it(
    make_settings, behind, front, files
):
    door = front(behind[1], files["server"], clients=files["client"][0])
    settings = broker_settings(
        make_settings, behind, door.port, tls_ca_file=files["server"][0], connect_timeout_s=1
    )
    with pytest.raises(QueueUnavailable):
        OutcomePublisher(broker_of(settings)).send_completions([completion_of(1)])
    assert door.passed_on == 0


@pytest.mark.parametrize("check", ["CERT_REQUIRED", "required"])
def test_limits_take_a_broker_url_as_celery_does(make_settings, redis_place, front, files, check):
    socket = make_url(redis_place.url.replace("redis+socket://", "redis://h")).database or ""
    door = front("/" + socket.partition("?")[0], files["server"])
    query = f"ssl_cert_reqs={check}&ssl_ca_certs={files['server'][0]}"
    url = f"rediss://127.0.0.1:{door.port}/0?{query}"
    settings = make_settings(broker={"url": url, "prefix": f"tls{door.port}-"})
    (row,) = use_limits(settings)
    assert row.settings.requests_per_minute == 60
    assert door.passed_on == 1
    publisher = OutcomePublisher(broker_of(settings))
    publisher.send_completions([completion_of(1)])
    publisher.close()


def postgres_url(database_url: str, port: int, ca_file: Path, **more: str) -> str:
    query = {"sslmode": "verify-full", "sslrootcert": str(ca_file), **more}
    url = make_url(database_url).set(host="127.0.0.1", port=port, query=query)
    return url.render_as_string(hide_password=False)


def socket_of(database_url: str) -> str:
    url = make_url(database_url)
    return f"{url.query.get('host', url.host)}/.s.PGSQL.{url.port or url.query.get('port', 5432)}"


def test_the_store_and_its_listeners_use_the_tls_that_the_url_asks_for(database_url, front, files):
    door = front(socket_of(database_url), files["server"], postgres=True)
    engine = open_engine(postgres_url(database_url, door.port, files["server"][0]))
    listener = Listener(engine, READY_CHANNEL)
    try:
        assert listener.wait(0)
        assert transact(engine, lambda c: c.execute(text("SELECT 42")).scalar_one()) == 42
        transact(engine, lambda c: notify(c, READY_CHANNEL))
        assert listener.wait(10)
        assert door.passed_on == 2
    finally:
        listener.close()
        engine.dispose()


@pytest.mark.parametrize("door_of", ["server", "stranger"])
def test_a_store_with_another_certificate_is_told_nothing(database_url, front, files, door_of):
    door = front(socket_of(database_url), files[door_of], postgres=True)
    known = files["client" if door_of == "server" else "stranger"][0]
    engine = open_engine(postgres_url(database_url, door.port, known))
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        transact(engine, lambda c: c.execute(text("SELECT 42")).scalar_one())
    engine.dispose()
    assert door.passed_on == 0
