"""The attempts that this worker executes.

Written on the event loop; heartbeats, cancellation and shutdown read the list through the loop.
Must not: be used from another thread directly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.contract.messages import AttemptBeat, AttemptKey
from workers.process.attempt import Attempt

#: Finished attempts that are kept to recognise a second delivery.
_REMEMBERED = 10_000


class InFlight:
    """The attempts of this process."""

    def __init__(self) -> None:
        self._running: dict[AttemptKey, tuple[Attempt, asyncio.Task[object]]] = {}
        self._handed_back: set[AttemptKey] = set()
        self._is_stopping = False
        self._recent: set[AttemptKey] = set()
        self._recent_order: deque[AttemptKey] = deque()
        self._started_at: dict[AttemptKey, float] = {}
        self.unannounced: set[AttemptKey] = set()

    def __len__(self) -> int:
        return len(self._running)

    def knows(self, key: AttemptKey) -> bool:
        """Whether the attempt runs here or ran here recently; its second delivery is skipped."""
        return key in self._running or key in self._recent

    @contextmanager
    def entered(self, attempt: Attempt) -> Iterator[None]:
        """Hold the attempt while the current task executes it; a stopping worker cancels it."""
        key = attempt.request.key
        task = asyncio.current_task()
        assert task is not None
        self._running[key] = (attempt, task)
        self._started_at[key] = asyncio.get_running_loop().time()
        self.unannounced.add(key)
        if self._is_stopping:
            self._handed_back.add(key)
            task.cancel()
        try:
            yield
        finally:
            del self._running[key]
            del self._started_at[key]
            self.unannounced.discard(key)
            self._remember(key)

    def beats(self) -> tuple[AttemptBeat, ...]:
        """Return all attempts as a heartbeat lists them; all count as announced now."""
        self.unannounced.clear()
        return tuple(
            AttemptBeat(
                rollout_id=key[0], attempt_no=key[1], phase=attempt.phase, step=attempt.step
            )
            for key, (attempt, _) in self._running.items()
        )

    def attempts(self) -> list[Attempt]:
        """Return the attempts under way."""
        return [attempt for attempt, _ in self._running.values()]

    def oldest_unannounced_s(self) -> float:
        """Return the longest time that a running attempt has not been in a heartbeat."""
        if not self.unannounced:
            return 0.0
        now = asyncio.get_running_loop().time()
        return now - min(self._started_at[key] for key in self.unannounced)

    def stop(self, labels: frozenset[str]) -> int:
        """Cancel attempts that are no longer wanted; return their number."""
        found = [
            task for attempt, task in self._running.values() if attempt.request.label in labels
        ]
        for task in found:
            task.cancel()
        return len(found)

    def hand_back_all(self) -> int:
        """Cancel all attempts, later ones, too; each ends with a `worker_stopped` completion."""
        self._is_stopping = True
        self._handed_back.update(self._running)
        for _, task in self._running.values():
            task.cancel()
        return len(self._running)

    def is_handed_back(self, attempt: Attempt) -> bool:
        """Whether the attempt was cancelled because the worker stops."""
        return attempt.request.key in self._handed_back

    def _remember(self, key: AttemptKey) -> None:
        self._recent.add(key)
        self._recent_order.append(key)
        if len(self._recent_order) > _REMEMBERED:
            self._recent.discard(self._recent_order.popleft())
