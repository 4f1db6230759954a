"""The collector: takes completions and heartbeats from the broker into the store.

Sole writer of what workers say. Commit first, acknowledge second: a crash in between brings the
messages again, and the fence (rollout, attempt) makes that harmless.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError

from pipeline.contract.errors import PipelineError, QueueUnavailable, ServiceUnavailable
from pipeline.contract.messages import Heartbeat
from pipeline.queue.completions import Delivery, OutcomeConsumer
from pipeline.queue.frames import encode_completions
from pipeline.service import process_id
from pipeline.settings import Settings
from pipeline.store.dead_letters import add_malformed, add_unknown
from pipeline.store.engine import transact
from pipeline.store.leases import keep_alive
from pipeline.store.outcomes import record_outcomes
from pipeline.store.processes import forget_process, report_process
from pipeline.store.rescores import record_rescores

log = logging.getLogger(__name__)

#: A lost worker is noticed this much later, at most; each report is a small transaction.
_REPORT_EVERY_S = 0.5

#: What a value nobody thought of ends in; not what a lack of memory or connections does.
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
    """Reads, commits, acknowledges; says how far it has read."""

    name = "collector"

    def __init__(
        self,
        engine: Engine,
        consumer: OutcomeConsumer,
        settings: Settings,
        *,
        stop_attempts: Callable[[list[str]], None],
    ) -> None:
        """Make a collector.

        Args:
            engine: The store.
            consumer: What workers say.
            settings: Batch size, linger, leases.
            stop_attempts: Tells workers to stop attempts that are no longer theirs.
        """
        self._engine = engine
        self._consumer = consumer
        self._settings = settings
        self._stop_attempts = stop_attempts
        self._process_id = process_id(self.name)
        self._reported_at = 0.0
        self._unstored: Delivery | None = None

    def step(self) -> None:
        """Take in one delivery, or report after a while without any."""
        settings = self._settings.collector
        if self._unstored is None:
            self._unstored = self._consumer.receive(
                most=settings.batch_size,
                linger_s=settings.linger_ms / 1000,
                timeout_s=_REPORT_EVERY_S,
            )
        delivery = self._unstored
        if delivery.messages:
            # If the store is away, the next step goes on here: while this connection lasts, the
            # broker gives what was not acknowledged to nobody else.
            unwanted = self._take_in(delivery)
            self._unstored = None
            self._consumer.ack(delivery)
            self._stop(unwanted)
        self._unstored = None
        if time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
            self._report(delivery)

    def close(self) -> None:
        """Sign off; what is not acknowledged is read by the next collector."""
        self._consumer.close()
        transact(self._engine, lambda connection: forget_process(connection, self._process_id))

    def _take_in(self, delivery: Delivery) -> list[str]:
        """Commit a delivery; return the labels of attempts that workers should stop."""
        try:
            return transact(self._engine, lambda c: self._write(c, delivery))
        # Broad on purpose: see `_take_in_part`.
        except Exception as error:
            if not _is_of_the_message(error):
                raise
            log.warning(
                "A delivery cannot be stored whole, its messages one by one: %s", _reason(error)
            )
        return [label for part in _parts(delivery) for label in self._take_in_part(part)]

    def _take_in_part(self, part: Delivery) -> list[str]:
        """Commit one message of a delivery; what the store refuses goes to the dead letters."""
        try:
            return transact(self._engine, lambda c: self._write(c, part))
        # Broad on purpose: a message that nobody can take in would come again for ever, and with
        # it all its neighbours.
        except Exception as error:
            if not _is_of_the_message(error):
                raise
            if not isinstance(error, DBAPIError):
                log.exception("A message cannot be taken in; it goes to the dead letters.")
            reason = f"The store refused it: {_reason(error)}"
        refused = Delivery(
            malformed=[("completion", reason, encode_completions([c])) for c in part.completions]
            + [("heartbeat", reason, b.model_dump_json().encode()) for b in part.heartbeats]
        )
        return transact(self._engine, lambda c: self._write(c, refused))

    def _write(self, connection: Connection, delivery: Delivery) -> list[str]:
        # Outcomes first: a rollout that is done need not be kept alive.
        said = delivery.completions
        report = record_outcomes(connection, [c for c in said if c.purpose == "attempt"])
        unknown = report.unknown + record_rescores(
            connection, [c for c in said if c.purpose == "rescore"]
        )
        malformed = delivery.malformed + [
            (refused.kind, refused.reason, refused.raw.encode())
            for beat in delivery.heartbeats
            for refused in beat.refused
        ]
        add_malformed(connection, malformed)
        add_unknown(connection, [(c, encode_completions([c])) for c in unknown])
        for kind, reason, _ in malformed:
            log.warning("A %s went to the dead letters: %s", kind, reason)
        for sentence in report.paused:
            log.warning("%s", sentence)
        lease_s = self._settings.lease.lease_s
        unwanted = report.stopped
        for beat in _latest(delivery.heartbeats):
            unwanted += keep_alive(connection, beat, lease_s=lease_s)
        return unwanted

    def _stop(self, labels: list[str]) -> None:
        try:
            self._stop_attempts(labels)
        except QueueUnavailable as error:
            log.warning("%s workers were not told to stop: %s", len(labels), error)

    def _report(self, delivery: Delivery) -> None:
        """Say how far all is read, if it is: only then may silence be held against a worker."""
        started = time.monotonic()
        connected_at = self._consumer.connected_at
        settled = (
            connected_at is not None
            and started - connected_at >= self._settings.lease.grace_s
            and delivery.drained
            and self._consumer.backlog() == 0
        )
        transact(
            self._engine,
            lambda connection: report_process(
                connection,
                self._process_id,
                self.name,
                watermark_age_s=time.monotonic() - started if settled else None,
            ),
        )
        self._reported_at = time.monotonic()


def _is_of_the_message(error: Exception) -> bool:
    """Say whether the error would be the same the next time: no server is to blame for it."""
    if isinstance(error, DBAPIError):
        return isinstance(error, DataError | IntegrityError)
    return isinstance(error, _OF_THE_MESSAGE) and not isinstance(error, ServiceUnavailable)


def _reason(error: Exception) -> str:
    said = str(getattr(error, "orig", error)).strip().splitlines()
    return said[0] if said else type(error).__name__


def _parts(delivery: Delivery) -> Iterator[Delivery]:
    yield Delivery(malformed=delivery.malformed)
    for completion in delivery.completions:
        yield Delivery(completions=[completion])
    for beat in delivery.heartbeats:
        yield Delivery(heartbeats=[beat])


def _latest(beats: list[Heartbeat]) -> list[Heartbeat]:
    """Return the newest heartbeat of each worker: after a pause there may be many."""
    newest: dict[str, Heartbeat] = {}
    for beat in beats:
        known = newest.get(beat.worker_id)
        if known is None or beat.sequence > known.sequence:
            newest[beat.worker_id] = beat
    return list(newest.values())
