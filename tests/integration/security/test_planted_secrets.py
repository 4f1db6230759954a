"""Secrets are planted everywhere, user code spreads them, and nothing that is kept holds one."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from fixtures.brokers import BrokerPlace
from fixtures.deployment import Deployment
from fixtures.waiting import wait_until
from kombu import Connection
from pyarrow import parquet
from sqlalchemy import Engine, MetaData, make_url, select

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.messages import COMPLETION_QUEUE, HEARTBEAT_QUEUE
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, RunConfig
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.frames import decode_completions
from pipeline.queue.payloads import open_payloads
from pipeline.store.engine import open_engine, transact
from pipeline.store.prompts import PromptSource
from pipeline.store.runs import get_run
from pipeline.trainer.export import export_run
from producers.datasets import Prompt
from producers.enqueue import enqueue

SECRETS = {
    "model key": "sk-planted-model-key-1",
    "database password": "planted-database-pw-2",
    "broker password": "planted-broker-pw-3",
    "signing key": "planted-signing-key-4",
    "key of another service": "planted-service-key-5",
}
QUEUES = (DEFAULT_REQUEST_QUEUE, COMPLETION_QUEUE, HEARTBEAT_QUEUE)
CODE = Path(__file__).with_name("leaky_code.py")


class EchoingModel(BaseHTTPRequestHandler):
    """Answers with the key it was called with, in good answers and in refusals."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        key = self.headers.get("Authorization", "no key")
        status, body = 200, {"choices": [{"message": {"role": "assistant", "content": key}}]}
        if "Refuse this." in asked:
            status, body = 400, {"error": {"message": f"Incorrect key: {key}"}}
        data = json.dumps(body).encode()
        self.server.keys.append(key)  # pyright: ignore[reportAttributeAccessIssue]
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def echoing_model() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EchoingModel)
    server.keys = []  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class RedisKeys:
    """Everything in a Redis."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def look(self) -> Iterator[tuple[str, bytes]]:
        return kept_in_redis(self._client)

    def let_go(self) -> None:
        """Nothing is held by looking."""


class AmqpQueues:
    """The queues of a RabbitMQ; what was looked at is held until it is let go.

    Given back after each look, messages would soon have been delivered too often to be kept.
    """

    def __init__(self, place: BrokerPlace) -> None:
        self._place = place
        self._seen: list[tuple[str, bytes]] = []
        self._connection = Connection(place.url)

    def look(self) -> Iterator[tuple[str, bytes]]:
        for name in QUEUES:
            try:
                self._fetch(self._place.prefix + name)
            except self._connection.channel_errors:
                continue  # nobody has declared it yet
        return iter(self._seen)

    def _fetch(self, name: str) -> None:
        channel: Any = self._connection.default_channel
        while message := channel.basic_get(name, no_ack=False):
            body = message.body
            self._seen.append((name, body if isinstance(body, bytes) else body.encode()))
            self._seen.append((f"properties in {name}", repr(message.properties).encode()))

    def let_go(self) -> None:
        self._connection.release()
        self._seen = []


Kept = RedisKeys | AmqpQueues


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[tuple[BrokerPlace, Kept]]:
    """A broker, and a look at all that it holds."""
    if request.param == "redis":
        yield request.getfixturevalue("guarded_redis")
        return
    place: BrokerPlace = request.getfixturevalue("amqp_place")
    queues = AmqpQueues(place)
    yield place, queues
    queues.let_go()


@pytest.fixture
def guarded_redis(redis_url: str) -> Iterator[tuple[BrokerPlace, Kept]]:
    """The private Redis, with a password while the test runs."""
    socket = make_url(redis_url.replace("redis+socket://", "redis://h")).database
    path = f"/{socket}".partition("?")[0]
    client = redis.Redis(unix_socket_path=path, password=None)
    client.config_set("requirepass", SECRETS["broker password"])
    client = redis.Redis(unix_socket_path=path, password=SECRETS["broker password"])
    url = redis_url.replace("://", f"://:{SECRETS['broker password']}@")
    yield BrokerPlace("redis", url), RedisKeys(client)
    client.config_set("requirepass", "")


def kept_in_tables(engine: Engine) -> Iterator[tuple[str, bytes]]:
    metadata = MetaData()
    metadata.reflect(engine)
    with engine.connect() as connection:
        for table in metadata.sorted_tables:
            for row in connection.execute(select(table)).mappings():
                for column, value in row.items():
                    data = bytes(value) if isinstance(value, bytes | memoryview) else None
                    yield f"{table.name}.{column}", str(value).encode() if data is None else data


def kept_in_redis(client: Any) -> Iterator[tuple[str, bytes]]:
    for key in client.scan_iter():
        place = f"redis {key!r}"
        yield place, key
        match client.type(key):
            case b"string":
                yield place, client.get(key) or b""
            case b"list":
                for value in client.lrange(key, 0, -1):
                    yield place, value
            case b"hash":
                for field, value in client.hgetall(key).items():  # pyright: ignore[reportAttributeAccessIssue]
                    yield from ((place, field), (place, value))
            case b"set":
                yield from ((place, member) for member in client.smembers(key))
            case b"zset":
                yield from ((place, member) for member in client.zrange(key, 0, -1))


def kept_in_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size < 50_000_000:
            yield str(path.relative_to(folder)), path.read_bytes()


def peeled(data: bytes) -> Iterator[bytes]:
    """Yield the data, and what is wrapped in it: envelopes of kombu, frames, compressed bodies."""
    yield data
    try:
        yield json.dumps(unpack_record(data).model_dump(), ensure_ascii=False).encode()
    except MalformedMessage:
        pass
    try:
        completions, _ = decode_completions(data)
        for completion in completions:
            yield completion.model_dump_json().encode()
            yield from peeled(completion.body)
    except MalformedMessage:
        pass
    try:
        envelope = json.loads(data)
    except ValueError:
        return
    if isinstance(envelope, dict) and isinstance(envelope.get("body"), str):
        try:
            yield from peeled(base64.b64decode(envelope["body"], validate=True))
        except ValueError:
            yield envelope["body"].encode()


def leaks(*kept: Iterator[tuple[str, bytes]]) -> list[str]:
    found = {
        f"{name} in {place}"
        for source in kept
        for place, data in source
        for layer in peeled(data)
        for name, secret in SECRETS.items()
        if secret.encode() in layer
    }
    return sorted(found)


@pytest.mark.parametrize(
    ("broker", "mode"),
    [("redis", "inline"), ("redis", "object"), ("amqp", "inline")],
    indirect=["broker"],
)
def test_nothing_that_is_kept_holds_a_secret(
    engine: Engine,
    broker: tuple[BrokerPlace, Kept],
    deploy: Callable[..., Deployment],
    echoing_model: ThreadingHTTPServer,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
):
    place, kept_in_broker = broker
    monkeypatch.setenv("OPENAI_API_KEY", SECRETS["model key"])
    monkeypatch.setenv("SOME_SERVICE_KEY", SECRETS["key of another service"])
    monkeypatch.setenv("MIRROR_URL", f"redis://:{SECRETS['broker password']}@h/0")
    with_password = open_engine(
        engine.url.set(password=SECRETS["database password"]).render_as_string(hide_password=False)
    )
    deployment = Deployment(
        with_password,
        place,
        deploy(place).folder,
        broker={"signing_key": SECRETS["signing key"]},
        llm={"base_url": f"http://127.0.0.1:{echoing_model.server_port}/v1", "client": "lean"},
        worker={"plugins": [str(CODE)]},
        payloads={"mode": mode},
    )
    try:
        config = RunConfig(agent="leaky", tools=("everything",), reward="leaky", max_attempts=1)
        prompts = [Prompt(n, {"prompt": "1 + 1", "answer": "2", "row": n}) for n in range(12)]
        enqueue(engine, run="leaky", config=config, source=PromptSource("s"), prompts=prompts)
        # First all but the collector, so that what waits on the broker can be seen.
        deployment.start_controller("dispatcher")
        deployment.start_worker()
        wait_until(lambda: completions_in(kept_in_broker.look()) == 12, 40, seen=deployment.picture)
        assert leaks(kept_in_broker.look()) == []
        kept_in_broker.let_go()
        deployment.start_controller("collector", "reconciler")
        deployment.wait_states({"succeeded": 2, "failed": 10})
        classes = {
            row["error_class"] for row in deployment.rows("SELECT error_class FROM rollouts")
        }
        assert classes == {None, "agent_bug", "model_bad_request", "reward_error"}
        assert leaks(kept_in_tables(engine), kept_in_broker.look()) == []
        payloads = open_payloads(deployment.settings)
        run = transact(engine, lambda connection: get_run(connection, "leaky"))
        for to in ("jsonl", "parquet"):
            report = export_run(
                engine, run, deployment.folder / f"out.{to}", to=to, payloads=payloads
            )
            assert (report.rollouts, report.unreadable) == (12, 0)
        rows = parquet.read_table(deployment.folder / "out.parquet").to_pylist()
        (deployment.folder / "out.parquet.txt").write_text(str(rows))
    finally:
        deployment.close()
        with_password.dispose()
    # The settings are handed to the processes of this test by their command line alone.
    assert leaks(kept_in_files(deployment.folder)) == []
    assert f"Bearer {SECRETS['model key']}" in echoing_model.keys  # pyright: ignore[reportAttributeAccessIssue]
    logs = (deployment.folder / "worker-1.log").read_text()
    assert "the environment is" in logs, "the log was written, without the secrets"
    if mode == "object":
        assert list((deployment.folder / "data" / "payloads").rglob("*.frame"))


def completions_in(kept: Iterator[tuple[str, bytes]]) -> int:
    """Count those of this test; the Redis may hold what other tests left."""
    count = 0
    for _, value in kept:
        for layer in peeled(value):
            try:
                found, _ = decode_completions(layer)
            except MalformedMessage:
                continue
            count += sum(each.label.startswith("leaky-") for each in found)
    return count
