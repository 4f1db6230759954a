"""Attachments: requests of later attempts carry what earlier attempts left.

That is the journal of their model calls, or the trajectory of a remote session that the new attempt
scores (docs/adr/0042, 0045). Used by the dispatcher between its commit and the publication. Must
not: publish, or unpack a journal or a trajectory.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from functools import cached_property

from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, ProcessDied, ServiceUnavailable
from pipeline.contract.journal import RESUMED_AFTER
from pipeline.contract.messages import AttemptKey, Completion, RolloutRequest
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.claim_checks import INLINE_BYTES, check_out
from pipeline.queue.frames import encode_completions
from pipeline.queue.journal_frames import INLINE_JOURNAL_BYTES, with_journal
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.journals import EarlierAttempt, earlier_attempts, read_frames
from pipeline.store.unscored import read_unscored

log = logging.getLogger(__name__)

#: Errors that no journal causes, however often they follow each other.
_FROM_OUTSIDE = frozenset(
    {ErrorClass.WORKER_LOST, ErrorClass.WORKER_STOPPED, ErrorClass.MODEL_RATE_LIMIT}
)


class Attachments:
    """Adds journals and unscored trajectories to requests.

    Args:
        engine: The store.
        settings: The payload store, and the broker's kind.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._opened: PayloadStore | None = None

    def attach(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests with their attachments.

        A request is left out whose rollout got its reward from an earlier attempt meanwhile. A
        journal only saves work: where it cannot be read, the attempt starts afresh.

        Raises:
            ServiceUnavailable: The payload store does not take an unscored trajectory.
        """
        scored = [self._with_trajectory(request) for request in requests]
        kept = [request for request in scored if request is not None]
        # A remote agent makes its calls through a gateway, which replays none.
        later = [r.rollout_id for r in kept if r.attempt_no > 1 and r.agentcore is None]
        if not later:
            return kept
        earlier = transact(self._engine, earlier_attempts, later)
        return [
            self._with_journal(request, earlier.get(request.rollout_id, ())) for request in kept
        ]

    def _with_trajectory(self, request: RolloutRequest) -> RolloutRequest | None:
        if request.unscored_no is None:
            return request
        # One at a time: the trajectories of a whole batch may not fit into the memory.
        key = request.rollout_id, request.unscored_no
        found = transact(self._engine, read_unscored, [key]).get(key)
        if found is None:
            return None
        frame = encode_completions([self._without_large_body(found)])
        return request.model_copy(update={"unscored": base64.b64encode(frame).decode()})

    def _without_large_body(self, completion: Completion) -> Completion:
        n_bytes = len(completion.body) + len(completion.tokens)
        if n_bytes <= self._broker.inline_bytes(INLINE_BYTES) or not completion.body:
            return completion
        return check_out(completion, self._payloads())

    def _with_journal(
        self, request: RolloutRequest, attempts: Sequence[EarlierAttempt]
    ) -> RolloutRequest:
        numbers = decide_replay([a for a in attempts if a.attempt_no < request.attempt_no])
        if not numbers:
            return request
        # One at a time: the journals of a whole batch may not fit into the memory.
        keys: list[AttemptKey] = [(request.rollout_id, number) for number in numbers]
        frames = transact(self._engine, read_frames, keys)
        inline_bytes = self._broker.inline_bytes(INLINE_JOURNAL_BYTES)
        try:
            return with_journal(request, frames, self._payloads(), inline_bytes=inline_bytes)
        except ServiceUnavailable as error:
            log.warning("%s starts afresh, without its journal: %s", request.label, error)
            return request

    @cached_property
    def _broker(self) -> Broker:
        return broker_of(self._settings)

    def _payloads(self) -> PayloadStore:
        # Opened at the first use, because a client of S3 takes a second to make.
        self._opened = self._opened or open_payloads(self._settings)
        return self._opened


def decide_replay(attempts: Sequence[EarlierAttempt]) -> list[int]:
    """Return the numbers of the attempts whose calls the next attempt replays.

    All that was recorded up to an error of the agent's own is dropped, and so is a journal that led
    to the same error twice.

    Args:
        attempts: All earlier attempts of a rollout, in order.
    """
    kept: list[EarlierAttempt] = []
    for attempt in attempts:
        is_resumed = attempt.error_class in RESUMED_AFTER
        kept = [*kept, attempt] if is_resumed and not _repeats(attempt, kept) else []
    return [attempt.attempt_no for attempt in kept if attempt.journal_bytes]


def _repeats(attempt: EarlierAttempt, before: Sequence[EarlierAttempt]) -> bool:
    """Say whether an attempt that replayed calls had an error of the rollout's own again."""
    error = (attempt.error_class, attempt.error_code)
    from_outside = attempt.error_class in _FROM_OUTSIDE and attempt.error_code != ProcessDied.code
    return (
        not from_outside
        and attempt.calls_replayed > 0
        and any((each.error_class, each.error_code) == error for each in before)
    )
