"""The collector: takes completions and heartbeats from the broker into the store.

Commits first and acknowledges second: after a crash in between the broker delivers the messages
again, and the fence (rollout, attempt) makes that harmless. Must not: decide outcomes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import StatementError

from pipeline.contract.errors import PipelineError, QueueUnavailable, ServiceUnavailable
from pipeline.contract.messages import (
    MARKED_QUEUES,
    Completion,
    Heartbeat,
    JournalFrame,
    Marker,
)
from pipeline.queue.completions import Delivery, OutcomeConsumer
from pipeline.queue.frames import encode_completions
from pipeline.queue.journal_frames import encode_frames
from pipeline.queue.markers import MarkerSender
from pipeline.service import process_id
from pipeline.settings import Settings
from pipeline.store.dead_letters import add_late_frame, add_malformed, add_unknown
from pipeline.store.engine import transact
from pipeline.store.faults import Fault, fault_of, reason_of, sqlstate_of
from pipeline.store.journals import add_frames, late_frames
from pipeline.store.leases import keep_alive
from pipeline.store.outcomes import record_outcomes
from pipeline.store.remote_sessions import hand_over
from pipeline.store.rescores import record_rescores
from pipeline.store.watermark import record_markers, remove_collectors, report_collector

log = logging.getLogger(__name__)

#: Adds at most this much to the time until a lost worker is noticed; each report is a transaction.
_REPORT_EVERY_S = 0.5
#: A broker counts as cut off when it takes longer than a quarter of a lease, and than this. During
#: a shorter pause no lease can end, because heartbeats renew a lease when a third of it has passed.
_LEAST_DELAY_S = 1.5

#: After so many equal failures of one delivery its messages are taken one by one.
_MOST_EQUAL_FAILURES = 5
#: Faults for which a delivery is tried whole until it succeeds.
_OF_THE_STORE = (Fault.AWAY, Fault.SCHEMA)

#: Errors caused by the message itself, so a retry cannot help. Resource errors are not among them.
_OF_THE_MESSAGE = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
    StatementError,
    PipelineError,
)


class Collector:
    """Reads, commits, acknowledges; reports its watermark."""

    name = "collector"

    def __init__(
        self,
        engine: Engine,
        consumer: OutcomeConsumer,
        settings: Settings,
        *,
        markers: MarkerSender,
        stop_attempts: Callable[[list[str]], None],
    ) -> None:
        """Make a collector.

        Args:
            engine: The store.
            consumer: Completions and heartbeats of workers.
            settings: Batch size, linger, leases.
            markers: Sends markers over a connection of its own.
            stop_attempts: Commands workers to stop attempts that are no longer theirs.
        """
        self._engine = engine
        self._consumer = consumer
        self._settings = settings
        self._markers = markers
        self._stop_attempts = stop_attempts
        self._process_id = process_id(self.name)
        self._reported_at: float | None = None
        #: All messages that the broker had sent by then will be committed by the next report.
        self._received_up_to: datetime | None = None
        self._was_cut_off = False
        self._most_delay_s = max(_LEAST_DELAY_S, settings.lease.lease_s / 4)
        self._unstored: Delivery | None = None
        self._failures: list[str] = []  #: of the unstored delivery, the same one several times

    def step(self) -> None:
        """Take in one delivery, or report after a while without any."""
        if self._reported_at is None:
            # Other collectors must know this one before it receives its first message.
            self._report()
        try:
            self._take_next()
        except QueueUnavailable:
            self._received_up_to, self._was_cut_off = None, True
            raise

    def _take_next(self) -> None:
        settings = self._settings.collector
        if self._unstored is None:
            self._unstored = self._consumer.receive(
                most=settings.batch_size,
                linger_s=settings.linger_ms / 1000,
                timeout_s=_REPORT_EVERY_S,
            )
        delivery = self._unstored
        if delivery.messages:
            # If the store is down, the next step continues here: while this connection lasts, the
            # broker delivers its unacknowledged messages to no other collector.
            unwanted = self._take_in(delivery)
            self._unstored, self._failures = None, []
            with self._watch_broker():
                self._consumer.ack(delivery)
            self._stop(unwanted)
        self._unstored = None
        if self._reported_at is None or time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
            self._report()

    def close(self) -> None:
        """Sign off; the next collector reads the unacknowledged messages."""
        self._markers.close()
        self._consumer.close()
        transact(self._engine, lambda c: remove_collectors(c, [self._process_id]))

    def _take_in(self, delivery: Delivery) -> list[str]:
        """Commit a delivery; return the labels of attempts that workers should stop."""
        try:
            return self._store(delivery)
        # Broad on purpose: see `_take_in_part`.
        except Exception as error:
            self._count(error)
            if not self._is_of_the_message(error) and not self._is_stuck(error):
                raise
            log.warning(
                "A delivery cannot be stored whole, its messages one by one: %s", reason_of(error)
            )
        return [label for part in _parts(delivery) for label in self._take_in_part(part)]

    def _take_in_part(self, part: Delivery) -> list[str]:
        """Commit one message; if the store rejects it, add it to the dead letters."""
        try:
            return self._store(part)
        # Broad on purpose: a message that always fails would be delivered for ever, together with
        # its neighbours.
        except Exception as error:
            if not self._is_of_the_message(error):
                raise
            if sqlstate_of(error) is None:
                log.exception("A message cannot be taken in; it goes to the dead letters.")
            reason = f"The store refused it: {reason_of(error)}"
        refused = Delivery(
            malformed=[("completion", reason, encode_completions([c])) for c in part.completions]
            + [("heartbeat", reason, b.model_dump_json().encode()) for b in part.heartbeats]
            + [("journal", reason, encode_frames([frame])) for frame in part.journal]
        )
        return self._store(refused)

    def _count(self, error: Exception) -> None:
        name = _name_of(error)
        self._failures = [*(known for known in self._failures if known == name), name]

    def _is_stuck(self, error: Exception) -> bool:
        """Say whether a delivery has failed so often in one way that its messages are split."""
        is_of_the_store = fault_of(error) in _OF_THE_STORE
        return not is_of_the_store and self._failures.count(_name_of(error)) >= _MOST_EQUAL_FAILURES

    def _is_of_the_message(self, error: Exception) -> bool:
        """Say whether a second try would end in the same error, because the message causes it."""
        fault = fault_of(error)
        if fault is Fault.DATA:
            return True
        # A message may need too much memory, or meet a bug; it never causes other transactions.
        if self._is_stuck(error) and fault is not Fault.CONFLICT:
            return True
        is_of_a_service = isinstance(error, ServiceUnavailable)
        return fault is None and isinstance(error, _OF_THE_MESSAGE) and not is_of_a_service

    def _store(self, delivery: Delivery) -> list[str]:
        # In a transaction of its own, because it takes no locks. First, so that what an attempt
        # recorded is there before its end, and not ignored.
        if delivery.journal:
            transact(self._engine, _add_frames, delivery.journal)
        unwanted = transact(self._engine, lambda c: self._write(c, delivery))
        # In a transaction of its own, because it locks rollouts and groups again.
        if rescored := [c for c in delivery.completions if c.purpose == "rescore"]:
            transact(self._engine, lambda c: _add_unknown(c, record_rescores(c, rescored)))
        return unwanted

    def _write(self, connection: Connection, delivery: Delivery) -> list[str]:
        # Outcomes first: a rollout that has ended needs no new lease.
        attempts = [c for c in delivery.completions if c.purpose == "attempt"]
        report = record_outcomes(connection, attempts)
        malformed = delivery.malformed + [
            (refused.kind, refused.reason, refused.raw.encode())
            for heartbeat in delivery.heartbeats
            for refused in heartbeat.refused
        ]
        add_malformed(connection, malformed)
        _add_unknown(connection, report.unknown)
        for kind, reason, _ in malformed:
            log.warning("A %s went to the dead letters: %s", kind, reason)
        for sentence in report.paused:
            log.warning("%s", sentence)
        hand_over(connection, [c for c in delivery.completions if c.purpose == "handover"])
        lease_s = self._settings.lease.lease_s
        unwanted = report.stopped + keep_alive(
            connection, _latest(delivery.heartbeats), lease_s=lease_s
        )
        record_markers(connection, self._process_id, delivery.markers)
        return unwanted

    def _stop(self, labels: list[str]) -> None:
        try:
            self._stop_attempts(labels)
        except QueueUnavailable as error:
            log.warning("Workers were not told to stop %d attempts: %s", len(labels), error)

    def _report(self) -> None:
        """Report that all received messages are committed, and send the next markers."""
        lease = self._settings.lease
        is_sending = self._markers.is_sending
        self._was_cut_off |= self._markers.delay_s > self._most_delay_s
        report = transact(
            self._engine,
            lambda connection: report_collector(
                connection,
                self._process_id,
                committed_up_to=self._received_up_to,
                was_cut_off=self._was_cut_off,
                with_markers=not is_sending,
                grace_s=lease.grace_s,
                alive_s=lease.lease_s,
                hides_s=self._consumer.hides_s,
                max_sessions=self._settings.agentcore.max_sessions,
            ),
        )
        self._reported_at, self._was_cut_off = time.monotonic(), False
        if report.silent:
            log.warning("%s no longer reports: its messages are read again.", report.silent)
            self._consumer.restore_unacknowledged()
            transact(self._engine, lambda c: remove_collectors(c, report.silent))
        with self._watch_broker():
            self._consumer.receive_sent()
        self._received_up_to = report.now
        if not is_sending:
            self._markers.send(
                [
                    Marker(collector_id=self._process_id, queue=queue, sent_at=report.now)
                    for queue in MARKED_QUEUES
                ]
            )

    @contextmanager
    def _watch_broker(self) -> Iterator[None]:
        """Note a broker that hangs: workers may be cut off for longer than this collector."""
        started = time.monotonic()
        yield
        self._was_cut_off |= time.monotonic() - started > self._most_delay_s


def _add_frames(connection: Connection, frames: list[JournalFrame]) -> None:
    if add_frames(connection, frames) < len(frames):
        for frame in late_frames(connection, frames):
            reason = (
                f"{frame.n_calls} calls of {frame.label} came after its outcome was recorded: its "
                "trajectory lacks them, unless they came before it as well."
            )
            log.warning("%s", reason)
            add_late_frame(connection, frame, reason, encode_frames([frame]))


def _add_unknown(connection: Connection, unknown: list[Completion]) -> None:
    add_unknown(connection, [(c, encode_completions([c])) for c in unknown])


def _name_of(error: Exception) -> str:
    return sqlstate_of(error) or type(error).__name__


def _parts(delivery: Delivery) -> Iterator[Delivery]:
    yield Delivery(malformed=delivery.malformed)
    for frame in delivery.journal:
        yield Delivery(journal=[frame])
    for completion in delivery.completions:
        yield Delivery(completions=[completion])
    for heartbeat in delivery.heartbeats:
        yield Delivery(heartbeats=[heartbeat])
    # Last: a marker says that all messages before it are committed.
    yield Delivery(markers=delivery.markers)


def _latest(heartbeats: list[Heartbeat]) -> list[Heartbeat]:
    """Return the newest heartbeat of each worker: after a pause there may be many."""
    newest: dict[str, Heartbeat] = {}
    for heartbeat in heartbeats:
        known = newest.get(heartbeat.worker_id)
        if known is None or heartbeat.sequence > known.sequence:
            newest[heartbeat.worker_id] = heartbeat
    return list(newest.values())
