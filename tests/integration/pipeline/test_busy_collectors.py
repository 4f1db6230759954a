"""A lost worker is noticed also while the queues of the collectors are never empty."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.deployment import LEASE_S, SHORT_LEASES, Deployment
from fixtures.messages import completion_of
from fixtures.waiting import wait_until

from pipeline.contract.messages import COMPLETION_QUEUE, MARKED_QUEUES, AttemptBeat, Heartbeat
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.completions import OutcomePublisher
from pipeline.store.engine import transact
from pipeline.store.watermark import read_watermark

#: A collector that is saturated on a busy machine; without a watermark it would be for ever.
RECOVERY_S = LEASE_S + 25.0
#: Messages that wait in each queue: a moment of work for the collector.
_WAITING = 40
#: Senders of each queue: one alone is slower than a collector, as it waits for confirmations.
_SENDERS = 2

ordered = pytest.mark.parametrize("broker_place", ["redis", "amqp"], indirect=True)


class Flood:
    """Keeps messages of other workers waiting in a queue, however fast they are read."""

    def __init__(self, broker: Broker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._stop = threading.Event()
        self.sent = 0
        self.is_full = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        publisher = OutcomePublisher(self._broker)
        with self._broker.connect() as connection:
            while not self._stop.is_set():
                missing = _WAITING - self._broker.depth(connection, self._queue)
                if missing < _WAITING:
                    self.is_full.set()
                    self._stop.wait(0.005)
                for _ in range(missing):
                    self._send(publisher)
        publisher.close()

    def _send(self, publisher: OutcomePublisher) -> None:
        self.sent += 1
        if self._queue == COMPLETION_QUEUE:
            publisher.send_completions([completion_of(0, purpose="rescore")])
            return
        beat = AttemptBeat(rollout_id=uuid4(), attempt_no=1, phase="agent")
        name = f"other-{self.sent % 10}"
        publisher.send_heartbeat(
            Heartbeat(worker_id=name, sequence=self.sent, attempts=(beat,) * 20)
        )


@contextmanager
def flood(deployment: Deployment) -> Iterator[None]:
    broker = broker_of(deployment.settings)
    senders = [Flood(broker, queue) for queue in MARKED_QUEUES * _SENDERS]
    try:
        for sender in senders:
            assert sender.is_full.wait(30), "the collector reads faster than this test sends"
        wait_until(lambda: transact(deployment.engine, read_watermark), what="a watermark")
        yield
    finally:
        for sender in senders:
            sender.stop()


@pytest.fixture
def hasty(deploy: Callable[..., Deployment], broker_place: BrokerPlace) -> Deployment:
    """A deployment whose collector commits few messages at once."""
    return deploy(broker_place, **SHORT_LEASES, collector={"batch_size": 4, "linger_ms": 1})


def wait_lost(deployment: Deployment, worker_pid: int, count: int) -> None:
    query = f"SELECT * FROM attempts WHERE state = 'lost' AND worker_id LIKE '%-{worker_pid}-%'"
    wait_until(
        lambda: len(deployment.rows(query)) == count,
        RECOVERY_S,
        what=f"{count} lost attempts",
        seen=deployment.picture,
    )


def held_by(deployment: Deployment, worker_pid: int) -> int:
    query = f"SELECT count(*) AS n FROM attempts WHERE worker_id LIKE '%-{worker_pid}-%'"
    (row,) = deployment.rows(query)
    assert row["n"]
    return row["n"]


@ordered
def test_a_dead_worker_is_noticed_on_a_backlog_that_never_empties(hasty):
    hasty.start_controller()
    doomed = hasty.start_worker()
    hasty.submit(6)
    hasty.wait_states({"running": 6})
    with flood(hasty):
        hasty.start_worker()
        before = transact(hasty.engine, read_watermark)
        held = held_by(hasty, doomed.pid)
        doomed.kill()
        wait_lost(hasty, doomed.pid, held)
    after = transact(hasty.engine, read_watermark)
    assert before is not None
    assert after is not None
    assert after > before
    hasty.gate.touch()
    hasty.wait_states({"succeeded": 6})


@ordered
def test_a_second_collector_that_starts_does_not_delay_judgement(hasty):
    hasty.start_controller()
    doomed = hasty.start_worker()
    hasty.submit(6)
    hasty.wait_states({"running": 6})
    with flood(hasty):
        held = held_by(hasty, doomed.pid)
        doomed.kill()
        time.sleep(LEASE_S - 3.0)
        hasty.start_controller("collector")
        wait_lost(hasty, doomed.pid, held)
    hasty.gate.touch()
    hasty.start_worker()
    hasty.wait_states({"succeeded": 6})
