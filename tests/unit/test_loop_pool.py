"""The pool of a worker: its places, and what becomes of requests that have none."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.celery_requests import Pending, celery_requests
from fixtures.waiting import wait_until
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer

from workers.process import celery_hooks
from workers.process.celery_hooks import TaskEnd, WorkerRequest
from workers.process.loop import LoopThread
from workers.process.loop_pool import LoopPool, pool_on


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture
def pool(loop: LoopThread) -> LoopPool:
    return pool_on(loop)(limit=2)


@pytest.fixture(autouse=True)
def _no_events_of_others() -> Iterator[None]:
    celery_hooks._events.clear()
    yield
    celery_hooks._events.clear()


class Work:
    """Tasks that run until they are released."""

    def __init__(self, loop: LoopThread, count: int, **delivered: Any) -> None:
        self._loop = loop
        self.running: list[str] = []
        self.ended: list[str] = []
        self.pending: Pending = Pending()
        self.acknowledged: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}
        self.requests = celery_requests(
            count, self.pending, self.acknowledged, task=self._run, **delivered
        )

    async def _run(self, request: WorkerRequest) -> TaskEnd:
        self.running.append(request.id)
        gate = self._gates[request.id] = asyncio.Event()
        await gate.wait()
        self.ended.append(request.id)
        return TaskEnd("done")

    def release(self, number: int) -> None:
        label = self.requests[number].id
        wait_until(lambda: label in self._gates, what=f"the start of {label}")
        self._loop.call(self._gates[label].set, timeout_s=5)

    def labels(self, *numbers: int) -> list[str]:
        return [self.requests[number].id for number in numbers]


def apply(pool: LoopPool, *requests: WorkerRequest) -> None:
    for request in requests:
        request.execute_using_pool(pool)


def events() -> list[tuple[str, str]]:
    return [(kind, fields["uuid"]) for kind, fields in celery_hooks._events]


def test_no_more_run_than_there_are_places_and_the_others_are_not_acknowledged(loop, pool):
    work = Work(loop, 3)
    apply(pool, *work.requests)
    wait_until(lambda: work.running == work.labels(0, 1))
    assert len(work.pending) == 2
    work.release(1)
    wait_until(lambda: work.running == work.labels(0, 1, 2))
    assert len(work.pending) == 3
    work.release(0)
    work.release(2)
    pool.on_stop()
    assert sorted(work.ended) == work.labels(0, 1, 2)


def test_a_stop_waits_for_what_runs_and_leaves_what_waits(loop, pool):
    work = Work(loop, 4)
    apply(pool, *work.requests)
    stop = threading.Thread(target=pool.on_stop)
    stop.start()
    work.release(0)
    wait_until(lambda: work.ended == work.labels(0))
    assert stop.is_alive()
    work.release(1)
    stop.join(20)
    assert not stop.is_alive()
    assert (work.running, len(work.pending)) == (work.labels(0, 1), 2)


def test_a_lost_connection_forgets_what_waits(loop, pool):
    work = Work(loop, 3)
    apply(pool, *work.requests)
    pool.flush()
    work.release(0)
    work.release(1)
    pool.on_stop()
    assert work.running == work.labels(0, 1)


def test_all_that_wait_at_the_end_of_a_connection_are_left(loop, pool):
    work = Work(loop, 3000)
    apply(pool, *work.requests)
    celery_hooks._is_closing.set()
    try:
        work.release(0)
        wait_until(lambda: not pool._waiting)
    finally:
        celery_hooks._is_closing.clear()
    work.release(1)
    pool.on_stop()
    assert (work.running, len(work.pending)) == (work.labels(0, 1), 2)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (SystemExit(3), "task-failed"),
        (KeyboardInterrupt(), "task-failed"),
        (ValueError("no such luck"), "task-failed"),
        (asyncio.CancelledError(), "task-revoked"),
    ],
)
def test_a_task_that_raises_gives_its_place_back_and_says_how_it_ended(loop, error, end):
    async def fail(_: WorkerRequest) -> TaskEnd:
        raise error

    pool = pool_on(loop)(limit=1)
    requests = celery_requests(2, Pending(), [], task=fail)
    apply(pool, *requests)
    pool.on_stop()
    pool.on_stop()
    kinds = [kind for kind, label in events() if label == requests[0].id]
    assert kinds == ["task-started", end]


def test_a_message_with_other_arguments_fails_its_task_alone(loop, pool):
    (wrong,) = celery_requests(1, Pending(), [], arguments=(), task=_needs_a_message)
    apply(pool, wrong)
    pool.on_stop()
    assert events()[-1] == ("task-failed", wrong.id)


async def _needs_a_message(_: WorkerRequest, message: str) -> TaskEnd:
    return TaskEnd(message)


@pytest.fixture
def hub(pool: LoopPool) -> Iterator[Hub]:
    """The running loop of Celery's thread: its only timer is far away, its connection silent."""
    hub = Hub(timer=Timer(max_interval=60))
    hub.call_later(60, lambda: None)
    connection, broker = socket.socketpair()
    hub.add_reader(connection, lambda: None)
    pool.register_with_event_loop(hub)
    over = threading.Event()

    def turn() -> None:
        ticks = hub.create_loop()
        while not over.is_set():
            next(ticks)

    began = threading.Event()
    hub.on_tick.add(began.set)
    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    assert began.wait(20)
    yield hub
    over.set()
    hub.call_soon(lambda: None)
    thread.join(20)
    hub.close()
    connection.close()
    broker.close()


def test_a_place_that_becomes_free_wakes_the_loop_that_asks_for_requests(loop, pool, hub):
    work = Work(loop, 2)
    apply(pool, *work.requests)
    wait_until(lambda: work.running == work.labels(0, 1))
    turned = threading.Event()
    hub.on_tick.add(turned.set)
    hub.call_soon(lambda: None)
    assert turned.wait(20)
    turned.clear()
    work.release(0)
    # Its timer alone would turn it after ten seconds.
    assert turned.wait(5)
    work.release(1)


def test_what_a_turn_of_the_loop_acknowledges_does_not_wait_for_the_next(loop, pool, hub):
    work = Work(loop, 2)
    acknowledged = [threading.Event(), threading.Event()]

    def read(number: int) -> None:
        """Read a request as kombu does: each reading is a pending call of its own."""
        request = work.requests[number]
        request._on_ack = lambda *_: hub.call_soon(acknowledged[number].set)
        apply(pool, request)
        if number == 0:
            hub.call_soon(read, 1)

    hub.call_soon(read, 0)
    assert acknowledged[0].wait(5)
    assert acknowledged[1].wait(5)
    work.release(0)
    work.release(1)


def test_events_of_the_loop_are_sent_in_their_order_with_their_times():
    sent: list[Any] = []

    class Dispatcher:
        def send(self, kind: str, **fields: Any) -> None:
            sent.append((kind, fields["uuid"], fields["timestamp"]))

        def flush(self) -> None:
            sent.append("flush")

    (request,) = celery_requests(1, Pending(), [])
    request.send_event("task-started")
    request.finish(TaskEnd("reward=1"), 0.5)
    celery_hooks._send_events(Dispatcher())
    (first, second, last) = sent
    assert (first[:2], second[:2]) == (
        ("task-started", request.id),
        ("task-succeeded", request.id),
    )
    assert first[2] <= second[2]
    assert last == "flush"
    assert not celery_hooks._events
