"""The reconciler: gives up attempts that no message has named for longer than their lease.

A lost attempt goes through the same decision as any error. Silence counts by the database clock,
and only up to the collectors' watermark. The reconciler also ends overdue groups, folds run
counters, deletes the journals of ended rollouts and advances the clocks of runs. Must not: publish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from kombu import Connection as BrokerConnection
from sqlalchemy import Connection, Engine

from pipeline.contract.errors import ErrorClass, QueueUnavailable, ServiceUnavailable
from pipeline.contract.messages import AttemptKey, Completion, ErrorRecord
from pipeline.departures import Departures
from pipeline.queue.broker import Broker
from pipeline.queue.claim_checks import find_outcomes
from pipeline.queue.journal_frames import INLINE_JOURNAL_BYTES, journal_folder, travels_inline
from pipeline.queue.payloads import PayloadStore
from pipeline.retry import HELD_NO_MORE, NEVER_HELD
from pipeline.settings import Settings
from pipeline.store.engine import store_time, transact
from pipeline.store.group_policy import end_overdue_groups
from pipeline.store.journals import delete_journals, ended_journals
from pipeline.store.leases import SilentAttempt, queues_in_flight, silent_attempts
from pipeline.store.outcomes import OutcomeReport, record_outcomes
from pipeline.store.run_counters import fold_run_counters
from pipeline.store.watermark import read_watermark
from pipeline.store.working_time import advance_clocks

log = logging.getLogger(__name__)

#: Groups ended in one transaction; their attempts are stopped at the worker's next heartbeat.
_MOST_OVERDUE = 500
#: A watermark is up to two seconds old also while the broker is well.
_LEAST_WATERMARK_AGE_S = 3.0
#: Seconds between two foldings of the run counters; readers sum the rows added meanwhile.
_FOLD_EVERY_S = 10.0
#: Journals of ended rollouts that are deleted together, as often.
_MOST_JOURNALS = 1000


class Reconciler:
    """Looks for silent attempts every `poll_s`."""

    name = "reconciler"

    def __init__(
        self, engine: Engine, broker: Broker, payloads: PayloadStore, settings: Settings
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._payloads = payloads
        self._settings = settings
        self._connection: BrokerConnection | None = None
        self._departures = Departures()
        self._folded_at = -_FOLD_EVERY_S

    def step(self) -> None:
        """Give up silent attempts and end overdue groups, then wait."""
        transact(self._engine, advance_clocks)
        transact(self._engine, self._end_overdue)
        report = self._give_up_silent()
        for sentence in report.paused:
            log.warning("%s", sentence)
        if report.retried or report.failed:
            log.warning(
                "%d attempts were lost: %d rollouts queued again, %d failed.",
                report.retried + report.failed,
                report.retried,
                report.failed,
            )
        if time.monotonic() - self._folded_at >= _FOLD_EVERY_S:
            transact(self._engine, fold_run_counters)
            self._delete_journals()
            self._folded_at = time.monotonic()
        time.sleep(self._settings.lease.poll_s)

    def close(self) -> None:
        """Close the connection to the broker."""
        if self._connection is not None:
            self._connection.release()
            self._connection = None

    def _end_overdue(self, connection: Connection) -> None:
        cut = end_overdue_groups(connection, most=_MOST_OVERDUE)
        if cut.groups_ready or cut.groups_dropped:
            log.info(
                "Deadlines passed: %d groups are ready as they are, %d dropped; %d rollouts cut.",
                cut.groups_ready,
                cut.groups_dropped,
                cut.cut,
            )

    def _delete_journals(self) -> None:
        """Delete the journals of rollouts that have ended: objects first, then rows."""
        ended = transact(self._engine, ended_journals, most=_MOST_JOURNALS)
        inline_bytes = self._broker.inline_bytes(INLINE_JOURNAL_BYTES)
        try:
            for each in ended:
                if each.has_objects or not travels_inline(
                    each.n_frames, each.n_bytes, inline_bytes=inline_bytes
                ):
                    self._payloads.delete_all(journal_folder(each.run_id, each.rollout_id))
        except ServiceUnavailable as error:
            log.warning("Journals of ended rollouts are not deleted yet: %s", error)
            return
        if ended:
            ids = [each.rollout_id for each in ended]
            transact(self._engine, delete_journals, ids)

    def _give_up_silent(self) -> OutcomeReport:
        silent = transact(self._engine, self._find_silent)
        if not silent:
            return OutcomeReport()
        # The payload store may be slow, so it is read between two transactions.
        recovered = {_key(attempt): self._recovered(attempt) for attempt in silent}

        def give_up(connection: Connection) -> OutcomeReport:
            # Attempts that were heard of in the meantime are silent no longer.
            still = [a for a in self._find_silent(connection) if _key(a) in recovered]
            return record_outcomes(connection, [recovered[_key(a)] or _lost(a) for a in still])

        return transact(self._engine, give_up)

    def _find_silent(self, connection: Connection) -> Sequence[SilentAttempt]:
        watermark = read_watermark(connection)
        if watermark is None:
            # No collector has read a marker yet: silence proves nothing.
            return ()
        lease = self._settings.lease
        self._watch_queues(connection, watermark)
        proven_before = watermark - timedelta(seconds=lease.grace_s)
        return silent_attempts(
            connection,
            watermark=watermark,
            departed=self._departures.by_run(proven_before),
            expire=not self._broker.keeps_order,
            grace_s=lease.grace_s,
            most=max(1, int(lease.max_redispatch_per_s * lease.poll_s)),
        )

    def _watch_queues(self, connection: Connection, watermark: datetime) -> None:
        """Record for each queue up to which dispatch all requests have left it.

        A watermark that stands still may mean that the broker accepts no messages. Requests are
        then still on their way, and an empty queue proves nothing.
        """
        now = store_time(connection)
        if (now - watermark).total_seconds() > self._most_watermark_age_s():
            self._departures = Departures()
            return
        queues = queues_in_flight(connection)
        self._departures.keep_only(queues)
        broker, asked_at = self._broker, time.monotonic()
        try:
            if self._connection is None:
                self._connection = broker.connect()
            for queue in queues:
                depth = broker.depth(self._connection, queue.queue, with_received=True)
                # A slow broker answers later than `now`: workers announce up to then what they got.
                seen_at = now + timedelta(seconds=time.monotonic() - asked_at)
                if not depth:
                    self._departures.note(queue, seen_at=seen_at, before=now)
                elif broker.keeps_order and queue.started_up_to is not None:
                    self._departures.note(queue, seen_at=seen_at, before=queue.started_up_to)
                elif not broker.counts_exactly:
                    # An estimated depth may have been zero while these requests already waited.
                    self._departures.forget(queue)
        except QueueUnavailable:
            self.close()
            self._departures = Departures()
            raise

    def _most_watermark_age_s(self) -> float:
        grace_s = max(self._settings.lease.grace_s, _LEAST_WATERMARK_AGE_S)
        # Without order the watermark waits for the slowest marker (pipeline/store/watermark.py).
        return grace_s if self._broker.keeps_order else 2 * grace_s + _LEAST_WATERMARK_AGE_S

    def _recovered(self, attempt: SilentAttempt) -> Completion | None:
        """Return the outcome of an attempt from the payload store, if only its message was lost."""
        if self._settings.payloads.mode != "object":
            return None
        # Of several executions any will do: each completion names its own body.
        for completion in find_outcomes(attempt.run_id, attempt.label, self._payloads):
            if completion.key == _key(attempt):
                return completion
        return None


def _key(attempt: SilentAttempt) -> AttemptKey:
    return attempt.rollout_id, attempt.attempt_no


def _lost(attempt: SilentAttempt) -> Completion:
    where = f"worker {attempt.worker_id}" if attempt.worker_id else "the broker"
    return Completion(
        run_id=attempt.run_id,
        group_id=attempt.group_id,
        rollout_id=attempt.rollout_id,
        attempt_no=attempt.attempt_no,
        label=attempt.label,
        worker_id=attempt.worker_id or "",
        outcome="failed",
        error=ErrorRecord(
            error_class=ErrorClass.WORKER_LOST,
            code=HELD_NO_MORE if attempt.worker_id else NEVER_HELD,
            message=f"No message named the attempt within its lease; last seen at {where}.",
        ),
    )
