"""Replays: requests of later attempts carry the journal of the earlier ones.

Used by the dispatcher between its commit and the publication. A journal saves work and nothing
else: where it cannot be had, the attempt starts afresh. Must not: publish, or unpack a frame.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, ProcessDied, ServiceUnavailable
from pipeline.contract.journal import RESUMED_AFTER
from pipeline.contract.messages import AttemptKey, RolloutRequest
from pipeline.queue.journal_frames import inline_bytes_of, with_journal
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.journals import EarlierAttempt, earlier_attempts, read_frames

log = logging.getLogger(__name__)

#: Ends that no journal causes, however often they follow each other.
_FROM_OUTSIDE = frozenset(
    {ErrorClass.WORKER_LOST, ErrorClass.WORKER_STOPPED, ErrorClass.MODEL_RATE_LIMIT}
)


class Replays:
    """Adds journals to requests.

    Args:
        engine: The store.
        settings: The payload store, and the broker's kind.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._payloads: PayloadStore | None = None

    def attach(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests, those of later attempts with what earlier ones recorded."""
        # A remote agent makes its calls through a gateway, which replays none.
        later = [r.rollout_id for r in requests if r.attempt_no > 1 and r.agentcore is None]
        if not later:
            return list(requests)
        earlier = transact(self._engine, earlier_attempts, later)
        return [
            self._with_journal(request, earlier.get(request.rollout_id, ())) for request in requests
        ]

    def _with_journal(
        self, request: RolloutRequest, attempts: Sequence[EarlierAttempt]
    ) -> RolloutRequest:
        numbers = decide_replay([a for a in attempts if a.attempt_no < request.attempt_no])
        if not numbers:
            return request

        # One at a time: the journals of a whole batch may not fit into the memory.
        keys: list[AttemptKey] = [(request.rollout_id, number) for number in numbers]
        frames = transact(self._engine, read_frames, keys)
        self._payloads = self._payloads or open_payloads(self._settings)
        inline_bytes = inline_bytes_of(self._settings)
        try:
            return with_journal(request, frames, self._payloads, inline_bytes=inline_bytes)
        except ServiceUnavailable as error:
            log.warning("%s starts afresh, without its journal: %s", request.label, error)
            return request


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
    """Say whether an attempt that replayed calls ended as one before it, by the rollout's fault."""
    error = (attempt.error_class, attempt.error_code)
    from_outside = attempt.error_class in _FROM_OUTSIDE and attempt.error_code != ProcessDied.code
    return (
        not from_outside
        and attempt.calls_replayed > 0
        and any((each.error_class, each.error_code) == error for each in before)
    )
