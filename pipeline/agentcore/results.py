"""The results service: takes results of remote sessions from SQS and S3 into the store.

A message names a result at once. Every few seconds the bucket is listed too, for results whose
message was lost or is never sent. Commits first and deletes messages second; the fence (rollout,
attempt) makes repeats harmless. With a gateway, results wait for the calls that were recorded
before them (docs/adr/0043). Must not: decide outcomes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import groupby

from sqlalchemy import Engine

from pipeline.agentcore.outcome import outcome_of, refused, timed_out
from pipeline.agentcore.remote_calls import read_remote_calls
from pipeline.agentcore.results_store import (
    MAX_RESULT_BYTES,
    QueuedMessage,
    ResultsStore,
    ResultTooLarge,
)
from pipeline.contract.agentcore import attempt_of_key, input_id_of
from pipeline.contract.messages import AttemptKey, Completion
from pipeline.contract.result_keys import ResultObject, announced_results
from pipeline.queue.claim_checks import check_out
from pipeline.queue.payloads import PayloadStore
from pipeline.redaction import Redactor
from pipeline.settings import Settings
from pipeline.store.dead_letters import add_malformed
from pipeline.store.engine import store_time, transact
from pipeline.store.journals import read_frames
from pipeline.store.outcomes import record_outcomes
from pipeline.store.remote_sessions import (
    RemoteAttempt,
    attempts_named,
    known_attempts,
    waiting_attempts,
)
from pipeline.store.watermark import read_watermark
from pipeline.tokens.recorded_calls import NO_CALLS, RemoteCalls

log = logging.getLogger(__name__)

#: Time between two lists of a bucket whose results are announced, and of one without messages.
_SWEEP_S, _SWEEP_ALONE_S = 10.0, 2.0
#: Time between two looks for runs with remote sessions.
_IDLE_S = 0.5
#: Results that are read at once, and that are recorded in one transaction.
_READERS, _AT_ONCE = 8, 64
#: Receipts of messages that wait for the collectors; more are left in the queue.
_MOST_HELD = 100
#: A message whose object stays missing goes to the dead letters after so many receives.
_MOST_RECEIVES = 5

E_FOREIGN, E_UNKNOWN = "E310", "E311"


class RemoteResults:
    """Reads, records, deletes; ends sessions whose time is up."""

    name = "results"

    def __init__(self, engine: Engine, payloads: PayloadStore, settings: Settings) -> None:
        self._engine = engine
        self._payloads = payloads
        self._settings = settings
        self._redactor = Redactor.of(settings, os.environ)
        self._store: ResultsStore | None = None
        self._readers = ThreadPoolExecutor(_READERS, "results")
        self._swept_at = float("-inf")
        #: Messages by the time when they were received, and results by that of their first listing.
        self._held: list[tuple[datetime, list[QueuedMessage]]] = []
        self._listed: dict[AttemptKey, datetime] = {}
        self._warned_of: set[str] = set()  #: objects of other programs

    def step(self) -> None:
        """Take in the announced results, then the listed ones; wait where no session exists."""
        waiting = self._waiting()
        if not waiting and not self._held:
            time.sleep(_IDLE_S)
            return
        store = self._store = self._store or ResultsStore(self._settings)
        queues = {url for a in waiting if (url := a.target.results_queue_url)}
        for queue_url in sorted(queues):
            self._receive(store, queue_url)
        self._take_announced(store)
        every_s = _SWEEP_S if queues and not self._listed else _SWEEP_ALONE_S
        if time.monotonic() - self._swept_at >= every_s:
            self._sweep(store)
            self._swept_at = time.monotonic()
        elif not queues:
            time.sleep(_IDLE_S)

    def close(self) -> None:
        """End the threads that read results."""
        self._readers.shutdown(cancel_futures=True)

    def _waiting(self) -> list[RemoteAttempt]:
        runs = self._settings.dispatch.runs
        return transact(self._engine, waiting_attempts, runs)

    def _receive(self, store: ResultsStore, queue_url: str) -> None:
        if len(self._held) >= _MOST_HELD:
            time.sleep(_IDLE_S)
        elif messages := store.receive(queue_url):
            self._held.append((transact(self._engine, store_time), messages))

    def _calls_complete_up_to(self) -> datetime | None:
        """Return the time before which recorded calls are in the store; None: wait for them.

        A gateway records a call before the agent gets its answer, so before the agent's result. The
        records of results that were seen by a time are therefore what the broker had by that time.
        """
        if self._settings.agentcore.gateway_url is None:
            return datetime.max.replace(tzinfo=UTC)
        return transact(self._engine, read_watermark)

    def _take_announced(self, store: ResultsStore) -> None:
        calls_up_to = self._calls_complete_up_to() if self._held else None
        if calls_up_to is None:
            return
        complete = [held for held in self._held if held[0] <= calls_up_to]
        if complete:
            self._take_in(store, [message for _, messages in complete for message in messages])
            self._held = self._held[len(complete) :]

    def _take_in(self, store: ResultsStore, messages: Sequence[QueuedMessage]) -> None:
        malformed: list[tuple[str, str, bytes]] = []
        named: list[tuple[QueuedMessage, ResultObject, AttemptKey]] = []
        for message in messages:
            try:
                results = announced_results(message.body)
            except ValueError as error:
                malformed.append(_dead_letter(E_FOREIGN, f"announces no result: {error}", message))
                continue
            for result in results:
                key = attempt_of_key(result.key)
                if key is None:
                    malformed.append(_dead_letter(E_UNKNOWN, f"names {result.key}", message))
                else:
                    named.append((message, result, key))
        keys = [key for *_, key in named]
        known = transact(self._engine, known_attempts, keys)
        malformed += [
            _dead_letter(E_UNKNOWN, f"names {result.key}, whose attempt is unknown", message)
            for message, result, key in named
            if key not in known
        ]
        missing = self._record(store, {key: result for _, result, key in named if key in known})
        late: list[QueuedMessage] = []
        for message, result, key in named:
            if key not in missing:
                continue
            if message.receives < _MOST_RECEIVES:
                late.append(message)
            else:
                malformed.append(_dead_letter(E_UNKNOWN, f"names {result.key}, missing", message))
        if malformed:
            transact(self._engine, add_malformed, malformed)
            for _, reason, _ in malformed:
                log.warning("A message of the results queue went to the dead letters: %s", reason)
        store.delete([message for message in messages if message not in late])

    def _sweep(self, store: ResultsStore) -> None:
        """Record results that no message announced, then end the sessions whose time is up."""
        waiting = self._waiting()
        wanted = {attempt.key for attempt in waiting}
        found: dict[AttemptKey, ResultObject] = {}
        for bucket, run in sorted({(a.target.results_bucket, a.run) for a in waiting}):
            inputs = [input_id_of(a.group_no) for a in waiting if a.run == run]
            first, last = f"{run}/{min(inputs)}", f"{run}/{max(inputs)}~"
            for key in store.list(bucket, prefix=f"{run}/", first=first, last=last):
                attempt_key = attempt_of_key(key)
                if attempt_key is None:
                    self._warn_of_unknown(f"s3://{bucket}/{key}")
                elif attempt_key in wanted:
                    found[attempt_key] = ResultObject(bucket, key)
        self._record_listed(store, found)
        # A result may have come between the list and the end of its session's time.
        undecided = wanted - found.keys()
        overdue = [a for a in self._waiting() if a.is_overdue and a.key in undecided]
        if overdue:
            calls = self._calls_of([attempt.key for attempt in overdue])
            self._commit([timed_out(a, calls.get(a.key, NO_CALLS)) for a in overdue])

    def _record_listed(self, store: ResultsStore, found: Mapping[AttemptKey, ResultObject]) -> None:
        """Record those of the listed results whose calls are in the store."""
        if not found:
            self._listed = {}
            return
        now = transact(self._engine, store_time)
        self._listed = {key: self._listed.get(key, now) for key in found}
        calls_up_to = self._calls_complete_up_to()
        if calls_up_to is None:
            return
        complete = [key for key, listed_at in self._listed.items() if listed_at <= calls_up_to]
        if complete:
            log.info("%d results were found in the bucket without a message.", len(complete))
            self._record(store, {key: found[key] for key in complete})
            for key in complete:
                del self._listed[key]

    def _record(
        self, store: ResultsStore, results: dict[AttemptKey, ResultObject]
    ) -> Collection[AttemptKey]:
        """Record the results of attempts that still want one; return those without an object."""
        missing: set[AttemptKey] = set()
        for part in _parts(list(results)):
            keys: Sequence[AttemptKey] = part
            attempts = transact(self._engine, attempts_named, keys)
            calls = self._calls_of([attempt.key for attempt in attempts])
            read = self._readers.map(
                lambda a, calls=calls: (
                    a,
                    self._read(store, a, results[a.key], calls.get(a.key, NO_CALLS)),
                ),
                attempts,
            )
            completions: list[Completion] = []
            for attempt, completion in read:
                if completion is None:
                    missing.add(attempt.key)
                else:
                    completions.append(completion)
            self._commit(completions)
        return missing

    def _calls_of(self, keys: Sequence[AttemptKey]) -> dict[AttemptKey, RemoteCalls]:
        """Return the calls that gateways recorded for these attempts."""
        frames = transact(self._engine, read_frames, keys)
        return {
            key: read_remote_calls(list(own), self._payloads)
            for key, own in groupby(frames, lambda frame: frame.key)
        }

    def _read(
        self,
        store: ResultsStore,
        attempt: RemoteAttempt,
        result: ResultObject,
        recorded: RemoteCalls,
    ) -> Completion | None:
        elapsed_s = 0.0
        if attempt.started_at is not None:
            elapsed_s = max(0.0, (datetime.now(UTC) - attempt.started_at).total_seconds())
        try:
            body = store.get(result)
        except ResultTooLarge as error:
            why = f"The result has {error}; at most {MAX_RESULT_BYTES} are read."
            return refused(
                attempt, why, code="result_too_large", elapsed_s=elapsed_s, recorded=recorded
            )
        if body is None:
            return None
        completion = outcome_of(
            attempt, body, elapsed_s=elapsed_s, redact=self._redactor.data, recorded=recorded
        )
        if len(completion.body) + len(completion.tokens) > self._settings.payloads.inline_max_bytes:
            return check_out(completion, self._payloads)
        return completion

    def _commit(self, completions: Sequence[Completion]) -> None:
        if not completions:
            return
        report = transact(self._engine, record_outcomes, completions)
        for sentence in report.paused:
            log.warning("%s", sentence)

    def _warn_of_unknown(self, place: str) -> None:
        if place not in self._warned_of:
            self._warned_of.add(place)
            log.warning("%s %s is no result of a session of this deployment.", E_UNKNOWN, place)


def _parts(keys: list[AttemptKey]) -> Iterable[list[AttemptKey]]:
    for start in range(0, len(keys), _AT_ONCE):
        yield keys[start : start + _AT_ONCE]


def _dead_letter(code: str, what: str, message: QueuedMessage) -> tuple[str, str, bytes]:
    return "result", f"{code}: the message {what}", message.body.encode("utf-8", "replace")
