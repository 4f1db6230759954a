"""A worker whose disk is full, whose loop is blocked, or that is sent nonsense; a store too old."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.deployment import Deployment
from fixtures.messages import completion_of
from fixtures.servers import PrivateServers
from fixtures.waiting import wait_until
from kombu import Producer
from sqlalchemy import Engine

from pipeline.contract.errors import QueueUnavailable, ServiceUnavailable
from pipeline.contract.messages import TASK_RUN, Completion, Heartbeat
from pipeline.queue.broker import broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.queue.claim_checks import load_body
from pipeline.queue.frames import encode_completions
from pipeline.queue.payloads import FolderPayloads
from rollout.app import run_command
from workers.process.heartbeats import Heartbeats, RejectedMessages
from workers.process.in_flight import InFlight
from workers.process.loop import LoopThread
from workers.process.outbox import Outbox


class Sent:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        self.beats: list[Heartbeat] = []

    def send_completions(self, completions: Sequence[Completion]) -> None:
        self.completions += completions

    def send_heartbeat(self, beat: Heartbeat) -> None:
        self.beats.append(beat)

    def close(self) -> None:
        pass


# A full disk


class SmallDisk:
    """A folder on a disk of its own that is full until room is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"
        free = shutil.disk_usage(folder).free
        self._ballast.write_bytes(b"x" * free)

    def make_room(self) -> None:
        self._ballast.unlink()


class FullByDecree(SmallDisk):
    """Where nothing can be mounted: renaming fails as on a full disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("pipeline.queue.payloads.os.replace", refuse)

    def make_room(self) -> None:
        self._monkeypatch.undo()


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
    yield SmallDisk(folder) if mounted else FullByDecree(folder, monkeypatch)
    if mounted:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_full_disk_is_named_with_a_remedy_and_holds_no_half_object(full_disk):
    payloads = FolderPayloads(full_disk.folder / "payloads")
    with pytest.raises(ServiceUnavailable, match="No space left") as caught:
        payloads.put("run/a.frame", os.urandom(100_000))
    assert caught.value.code == "E203"
    assert "Free some space" in caught.value.remedy
    assert [p for p in full_disk.folder.rglob("*") if p.is_file() and "ballast" not in p.name] == []


def test_a_completion_waits_for_room_on_the_disk_and_is_not_lost(full_disk, tmp_path, caplog):
    payloads, sent = FolderPayloads(full_disk.folder / "payloads"), Sent()
    outbox = Outbox(sent, payloads, inline_max_bytes=10, spool=tmp_path / "spool")  # pyright: ignore[reportArgumentType]
    outbox.start()
    body = os.urandom(50_000)
    outbox.put(completion_of(1, body=body))
    wait_until(lambda: "waits for the payload store" in caplog.text, 10)
    assert sent.completions == []
    full_disk.make_room()
    (completion,) = wait_until(lambda: sent.completions, 10)
    outbox.close(timeout_s=5)
    assert completion.body == b""
    assert completion.body_uri is not None
    assert load_body(completion.body_uri, completion.body_digest, payloads) == body


def test_a_worker_that_must_end_on_a_full_disk_sends_the_body_itself(full_disk, tmp_path):
    payloads, sent = FolderPayloads(full_disk.folder / "payloads"), Sent()
    outbox = Outbox(sent, payloads, inline_max_bytes=10, spool=tmp_path / "spool")  # pyright: ignore[reportArgumentType]
    outbox.start()
    outbox.put(completion_of(1, body=b"x" * 50_000))
    outbox.close(timeout_s=0.5)
    (completion,) = sent.completions
    assert completion.body == b"x" * 50_000


# A broker that is away


class Away(Sent):
    """A publisher whose broker does not answer."""

    def send_completions(self, completions: Sequence[Completion]) -> None:
        raise QueueUnavailable("The broker does not answer.")


def test_what_no_broker_took_before_the_end_is_sent_by_the_next_worker(tmp_path):
    spool, payloads = tmp_path / "spool", FolderPayloads(tmp_path / "payloads")

    def outbox(publisher: Sent) -> Outbox:
        made = Outbox(publisher, payloads, inline_max_bytes=10**6, spool=spool)  # pyright: ignore[reportArgumentType]
        made.start()
        return made

    said = [completion_of(number, body=b"x" * 50) for number in (1, 2, 3)]
    first = outbox(Away())
    for completion in said:
        first.put(completion)
    first.close(timeout_s=0.2)
    assert list(spool.glob("*.frame"))
    (spool / "broken.frame").write_bytes(b"no frame")
    sent = Sent()
    second = outbox(sent)
    second.put(completion_of(4))
    wait_until(lambda: len(sent.completions) == 4, 10)
    second.close(timeout_s=5)
    assert sent.completions == [*said, completion_of(4)], "what lay there goes first, and whole"
    assert [path.name for path in spool.iterdir()] == ["broken.frame"], "kept for a person"


def test_an_outcome_that_cannot_be_written_down_holds_up_no_other(tmp_path, caplog):
    class Encoding(Sent):
        def send_completions(self, completions: Sequence[Completion]) -> None:
            encode_completions(completions)
            super().send_completions(completions)

    sent, payloads = Encoding(), FolderPayloads(tmp_path)
    outbox = Outbox(sent, payloads, inline_max_bytes=10**6, spool=tmp_path / "spool")  # pyright: ignore[reportArgumentType]
    bad = completion_of(2).model_copy(update={"worker_id": "\ud83d"})
    for completion in (completion_of(1), bad, completion_of(3)):
        outbox.put(completion)
    outbox.start()
    wait_until(lambda: len(sent.completions) == 2, 10)
    assert sent.completions == [completion_of(1), completion_of(3)]
    assert "has an outcome that cannot be encoded" in caplog.text
    outbox.close(timeout_s=5)
    assert outbox.beats() == (), "its lease is not held either"


# A blocked loop


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


def test_a_blocked_loop_is_reported_with_the_line_that_blocks_it(loop, caplog):
    sent, release = Sent(), threading.Event()
    heartbeats = Heartbeats(
        sent,  # pyright: ignore[reportArgumentType]
        loop,
        InFlight(),
        template=Heartbeat(worker_id="w", sequence=0, capacity=3),
        waiting=tuple,
        activity=tuple,
        rejected=RejectedMessages(),
        every_s=0.1,
        announce_s=0.1,
    )
    heartbeats.start()
    wait_until(lambda: sent.beats, 10)

    async def thoughtless_agent() -> None:
        release.wait(20)

    caplog.set_level(logging.ERROR)
    future = loop.submit(thoughtless_agent())
    wait_until(lambda: "thoughtless_agent" in caplog.text, 10)
    assert "The event loop has not answered" in caplog.text
    silent_at = len(sent.beats)
    time.sleep(0.3)
    assert len(sent.beats) == silent_at, "a worker that stands still sends no heartbeat"
    release.set()
    future.result(20)
    wait_until(lambda: len(sent.beats) > silent_at, 10)
    assert sent.beats[-1].loop_lag_ms >= 1000, "and says afterwards how long it stood still"
    heartbeats.close()


def test_a_task_that_exits_does_not_end_the_loop(loop, caplog):
    async def leaves() -> None:
        sys.exit(3)

    async def careless_agent() -> str:
        await asyncio.gather(asyncio.create_task(leaves()), return_exceptions=True)
        return "done"

    future = loop.submit(careless_agent())
    wait_until(lambda: "the event loop goes on" in caplog.text, 10)
    assert loop.call(lambda: 42, timeout_s=5) == 42
    future.cancel()


def test_a_task_that_stops_the_loop_does_not_end_it(loop, caplog):
    async def careless_agent() -> None:
        asyncio.get_running_loop().stop()

    loop.submit(careless_agent()).result(10)
    wait_until(lambda: "A task stopped the event loop" in caplog.text, 10)
    assert loop.call(lambda: 42, timeout_s=5) == 42


# Nonsense on the broker


@pytest.fixture
def deploy(engine: Engine, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(place: BrokerPlace) -> Deployment:
        made.append(Deployment(engine, place, tmp_path))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_nonsense_among_requests_ends_in_the_dead_letters_and_its_neighbours_succeed(
    deploy, request, kind
):
    place = request.getfixturevalue(f"{kind}_place")
    deployment = deploy(place)
    deployment.gate.touch()
    broker = broker_of(deployment.settings)
    app = make_celery_app(broker)
    name = broker.queue("rollouts").name
    for arguments in (("not json",), ('{"schema_version": 1}',), ("{}", "one", "too many"), ()):
        app.send_task(TASK_RUN, args=arguments, queue=name)
    app.send_task("rollout.unheard-of", queue=name)
    with broker.connect() as connection:
        producer = Producer(connection)
        for body, content_type in (
            (b"\xff\xfe no text", "application/x-python-serialize"),
            (json.dumps({"no": "task"}).encode(), "application/json"),
        ):
            producer.publish(
                body,
                exchange="",
                routing_key=name,
                declare=[broker.queue("rollouts")],
                content_type=content_type,
                content_encoding="binary" if b"\xff" in body else "utf-8",
                serializer=None,
            )
    app.close()
    deployment.submit(3)
    deployment.start_controller()
    deployment.start_worker()
    deployment.wait_states({"succeeded": 3})
    query = "SELECT * FROM dead_letters"
    wait_until(lambda: len(deployment.rows(query)) == 2, 20, seen=deployment.picture)
    letters = deployment.rows(query)
    assert {letter["kind"] for letter in letters} == {"request"}
    assert sorted(bytes(letter["body"]) for letter in letters) == [
        b"not json",
        b'{"schema_version": 1}',
    ]


# A store that was not migrated


def test_a_store_that_was_not_migrated_is_refused_with_the_remedy(
    servers: PrivateServers, monkeypatch, capsys
):
    url = servers.create_database(migrated=False)
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", url)
    try:
        assert run_command(["runs", "--json"]) == 3
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["code"], error["remedy"]) == ("E102", "Run: rollout db upgrade")
    finally:
        servers.drop_database(url)


def test_a_sync_agent_call_does_not_block_the_loop(loop):
    """The other side of the watchdog: what runs in a thread as it should is not reported."""
    from workers.core.sync_call import call_sync_or_async

    release = threading.Event()

    async def careful_agent() -> bool:
        return await call_sync_or_async(release.wait, 10)

    future = loop.submit(careful_agent())
    assert loop.call(lambda: 42, timeout_s=5) == 42
    release.set()
    assert future.result(20)
    assert asyncio.iscoroutinefunction(careful_agent)
