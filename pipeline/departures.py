"""Proof that requests have left their queue, so that their unannounced attempts are lost.

The reconciler notes two facts: a queue was empty, or, where the broker keeps order, a worker runs a
request that was dispatched at a certain time. Must not: read a clock, the broker or the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from pipeline.store.leases import QueueInFlight

#: Facts kept for each queue. A fact counts once all messages up to `lease.grace_s` after it are
#: read; while collectors lag for longer than these facts reach back, the wait is longer.
_MOST_FACTS = 256


class Departures:
    """For each queue, the times up to which its requests have left it."""

    def __init__(self) -> None:
        self._facts: dict[str, deque[tuple[datetime, datetime]]] = {}
        self._runs: dict[str, Sequence[UUID]] = {}

    def keep_only(self, queues: Sequence[QueueInFlight]) -> None:
        """Forget the queues that have no attempt in flight any more."""
        self._runs = {queue.queue: queue.run_ids for queue in queues}
        self._facts = {name: self._facts.get(name, deque()) for name in self._runs}

    def note(self, queue: QueueInFlight, *, seen_at: datetime, before: datetime) -> None:
        """Record that all requests dispatched before a time have left the queue.

        Args:
            queue: The queue.
            seen_at: The time of this observation.
            before: Requests dispatched earlier have left; what has left never comes back.
        """
        facts = self._facts[queue.queue]
        if facts:
            before = max(before, facts[-1][1])
        if len(facts) == _MOST_FACTS:
            facts.popleft()
        facts.append((seen_at, before))

    def forget(self, queue: QueueInFlight) -> None:
        """Drop what was noted of a queue, because it proved to be wrong."""
        self._facts[queue.queue].clear()

    def by_run(self, seen_before: datetime) -> dict[UUID, datetime]:
        """Return the proven time for each run with attempts in flight, if there is one.

        Args:
            seen_before: Only observations before this time count. By then a worker has announced
                the requests that had left the queue, and the collector has read it.
        """
        proven: dict[UUID, datetime] = {}
        for name, facts in self._facts.items():
            while len(facts) > 1 and facts[1][0] < seen_before:
                facts.popleft()
            if facts and facts[0][0] < seen_before:
                proven |= dict.fromkeys(self._runs[name], facts[0][1])
        return proven
