"""A request is acknowledged and executed, or neither, however the end of a connection falls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.celery_requests import Pending, celery_requests

from workers.process.celery_hooks import LastAcknowledgements, WorkerRequest


@pytest.fixture
def pending() -> Pending:
    """What Celery's loop would do on its next turn."""
    return deque()


@pytest.fixture
def connection(pending: Pending) -> Iterator[Any]:
    """A connection on which the worker consumes."""

    def pop_all() -> list[Callable[[], None]]:
        return [pending.popleft() for _ in range(len(pending))]

    step = LastAcknowledgements(None)
    consumer = SimpleNamespace(channel=object())
    parent = SimpleNamespace(
        hub=SimpleNamespace(_pop_ready=pop_all),
        task_consumer=consumer,
        connection=SimpleNamespace(transport=SimpleNamespace(driver_type="redis")),
    )
    step.start(parent)
    yield SimpleNamespace(close=lambda: step.stop(parent), open=lambda: step.start(parent))
    step.start(parent)


def accept(request: WorkerRequest, executed: list[str]) -> None:
    request.on_accepted(1, time.monotonic())
    if not request.is_left:
        executed.append(request.id)


def test_what_started_before_the_connection_closes_is_acknowledged(connection, pending):
    acknowledged: list[str] = []
    executed: list[str] = []
    (request,) = celery_requests(1, pending, acknowledged)
    accept(request, executed)
    assert acknowledged == []
    connection.close()
    assert acknowledged == executed == [request.id]


@pytest.mark.parametrize(
    ("delivered", "count"),
    [
        ({}, 0),
        ({"info": {"redelivered": False}}, 0),
        ({"info": {"redelivered": True}}, 1),
        ({"info": {"redelivered": True}, "headers": {"x-delivery-count": 3}}, 3),
    ],
)
def test_a_request_says_how_often_it_was_delivered_before(pending, delivered, count):
    (request,) = celery_requests(1, pending, [], **delivered)
    assert request.earlier_deliveries == count


def test_what_would_start_after_it_is_left_to_another_worker(connection, pending):
    acknowledged: list[str] = []
    executed: list[str] = []
    left, taken = celery_requests(2, pending, acknowledged)
    connection.close()
    accept(left, executed)
    assert (acknowledged, executed, len(pending)) == ([], [], 0)
    connection.open()
    accept(taken, executed)
    assert executed == [taken.id]


def test_threads_that_race_with_the_end_execute_what_they_acknowledged(connection, pending):
    acknowledged: list[str] = []
    executed: list[str] = []
    made = celery_requests(400, pending, acknowledged)
    halfway = threading.Event()

    def work(mine: list[WorkerRequest]) -> None:
        for number, request in enumerate(mine):
            if number == len(mine) // 2:
                halfway.set()
            accept(request, executed)

    threads = [threading.Thread(target=work, args=(made[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    assert halfway.wait(20)
    connection.close()
    for thread in threads:
        thread.join(20)
    assert not pending
    assert sorted(acknowledged) == sorted(executed)
