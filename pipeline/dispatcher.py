"""The dispatcher: turns queued rollouts into committed attempts, then publishes them.

Row first, publish second. Only the dispatcher publishes attempts: first ones, retries and those of
lost rollouts. Requested rescores are published too, see `rescorer.py`. Must not: decide outcomes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection, Engine

from pipeline.attachments import Attachments
from pipeline.contract.errors import ErrorClass, ServiceUnavailable
from pipeline.contract.messages import Completion, ErrorRecord, RolloutRequest
from pipeline.policy_announcer import PolicyAnnouncer
from pipeline.queue.requests import RequestPublisher
from pipeline.requests import request_of
from pipeline.rescorer import RescoreDispatcher
from pipeline.settings import Settings
from pipeline.store.capacity import first_not_admitted
from pipeline.store.engine import WORK_CHANNEL, Listener, transact
from pipeline.store.outcomes import record_outcomes
from pipeline.store.remote_sessions import count_sessions, open_sessions
from pipeline.store.rollouts import (
    ClaimedAttempt,
    claim,
    count_in_flight,
    renew_unstarted,
    set_deadlines,
    wait_to_claim,
)
from pipeline.store.runs import Run, active_runs, ids_of

log = logging.getLogger(__name__)

_NEVER_PUBLISHED = ErrorRecord(
    error_class=ErrorClass.WORKER_STOPPED,
    code="never_published",
    message="The dispatcher stopped before the broker had the request.",
)
_TOO_LARGE = ErrorRecord(
    error_class=ErrorClass.CONTRACT,
    code="request_too_large",
    message="Its prompt does not fit into a message of this broker. Shorten it, or let the prompt "
    "name where its content lies.",
)


@dataclass(slots=True)
class _Batch:
    queue: str
    requests: list[RolloutRequest]
    claimed_at: float = field(default_factory=time.monotonic)
    is_tried: bool = False


class Dispatcher:
    """Keeps up to `max_in_flight` attempts on the broker and in workers."""

    name = "dispatcher"

    def __init__(self, engine: Engine, publisher: RequestPublisher, settings: Settings) -> None:
        self._engine = engine
        self._publisher = publisher
        self._settings = settings.dispatch
        self._most_sessions = settings.agentcore.max_sessions
        # SQS drops a request that is older than `request_expires_s`. The lease of its attempt ends
        # only after that, so that no stale copy can run beside its successor. On the other brokers
        # an unstarted attempt is lost only when its request has left the queue.
        self._unstarted_lease_s = settings.dispatch.request_expires_s + settings.lease.lease_s
        #: A request that waited for the broker for longer than this is renewed before it is sent.
        self._renewed_after_s = settings.lease.grace_s / 2
        self._listener = Listener(engine, WORK_CHANNEL)
        self._rescores = RescoreDispatcher(engine, publisher, settings)
        self._announcer = PolicyAnnouncer(engine, publisher)
        self._attachments = Attachments(engine, settings)
        self._unpublished: list[_Batch] = []
        self._woken = True

    def step(self) -> None:
        """Publish committed attempts, claim more, or wait until there is work."""
        self._publish()
        self._unpublished = transact(self._engine, self._claim)
        is_idle = not self._unpublished
        self._publish()
        self._announcer.step()
        if not self._rescores.step() and is_idle:
            self._woken = self._listener.wait(self._settings.poll_s)

    def close(self) -> None:
        """Hand back attempts that were claimed and could not be published."""
        try:
            self._publish()
        except ServiceUnavailable:
            requests = [request for batch in self._unpublished for request in batch.requests]
            log.warning("dispatcher hands back %d unpublished attempts.", len(requests))
            self._record_unsent(requests, _NEVER_PUBLISHED)
        self._listener.close()
        self._publisher.close()

    def _publish(self) -> None:
        while self._unpublished:
            batch = self._unpublished[0]
            if not batch.is_tried:
                batch.requests = self._attachments.attach(batch.requests)
            if batch.is_tried or time.monotonic() - batch.claimed_at > self._renewed_after_s:
                self._renew(batch)
            batch.is_tried = True
            too_large = self._publisher.publish(batch.requests, queue=batch.queue)
            self._unpublished.pop(0)
            if too_large:
                # Published again, they would delay all others.
                log.warning("%d requests are too large for the broker; they fail.", len(too_large))
                self._record_unsent(too_large, _TOO_LARGE)

    def _renew(self, batch: _Batch) -> None:
        """Begin the unstarted leases anew; drop requests of attempts that started or ended."""
        keys = [request.key for request in batch.requests]
        unstarted = transact(self._engine, renew_unstarted, keys, lease_s=self._unstarted_lease_s)
        batch.requests = [request for request in batch.requests if request.key in unstarted]
        batch.claimed_at = time.monotonic()

    def _record_unsent(self, requests: list[RolloutRequest], error: ErrorRecord) -> None:
        """End attempts whose requests the broker does not have, all with one error."""
        failures = [
            Completion(**request.identity, worker_id="", outcome="failed", error=error)
            for request in requests
        ]
        transact(self._engine, record_outcomes, failures)

    def _claim(self, connection: Connection) -> list[_Batch]:
        wait_to_claim(connection)
        in_flight = count_in_flight(connection)
        only = ids_of(connection, self._settings.runs)
        if self._settings.runs:
            in_flight = {run_id: n for run_id, n in in_flight.items() if run_id in only}
        room = self._settings.max_in_flight - sum(in_flight.values())
        # Refilling each freed slot at once would make many small transactions of few large ones.
        if room < max(1, self._settings.max_in_flight // 10) and self._woken:
            return []
        # One batch, because claimed requests that the broker has not confirmed would grow old here.
        room = min(room, self._settings.batch_size)
        claims: list[tuple[Run, list[ClaimedAttempt]]] = []
        free_sessions: int | None = None
        runs = active_runs(connection) if room > 0 else []
        if self._settings.runs:
            runs = [run for run in runs if run.run_id in only]
        for position, run in enumerate(runs):
            # Runs of equal priority share the remaining room; a higher priority takes all it can.
            peers = sum(other.config.priority == run.config.priority for other in runs[position:])
            most = -(-room // peers)
            if run.config.max_in_flight is not None:
                most = min(most, run.config.max_in_flight - in_flight.get(run.run_id, 0))
            is_paused = run.policy is not None and run.policy.mode == "pause"
            if most <= 0 or is_paused:
                continue
            end = first_not_admitted(connection, run) if run.config.is_admitted else None
            lease_s = self._unstarted_lease_s
            claim_some = partial(claim, connection, run, lease_s=lease_s, end=end)
            claimed: list[ClaimedAttempt] = []
            if run.config.agentcore is not None:
                if run.config.reward is not None:
                    # Scoring needs no session, so it does not wait for a free one.
                    claimed = claim_some(most=most, unscored=True)
                if free_sessions is None:
                    free_sessions = self._most_sessions - count_sessions(connection)
                most = min(most - len(claimed), free_sessions)
            if most > 0:
                claimed += claim_some(most=most)
            if free_sessions is not None and run.config.agentcore is not None:
                free_sessions -= open_sessions(connection, run, claimed)
            room -= len(claimed)
            claims.append((run, claimed))
        set_deadlines(connection, claims)
        return [
            _Batch(run.config.queue, [request_of(run, attempt) for attempt in claimed])
            for run, claimed in claims
            if claimed
        ]
