"""The callers of one run that wait in this process, and the slots reserved for them.

A slot belongs to the run and not to a caller: the first caller takes it when it is due, so a caller
that stops waiting leaves no gap. Used by `Limiter`. Reads no clock.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from pipeline.limits.lease import Lease


@dataclass(eq=False, slots=True)
class Waiter:
    """One caller; its future gets the lease."""

    tokens: int
    future: asyncio.Future[Lease]


@dataclass(order=True, slots=True)
class Slot:
    """A time at which one call may start."""

    at: float  #: in this process's clock
    server_at: float = field(compare=False)  #: in the Redis server's clock
    tokens: int = field(compare=False)
    expires_at: float = field(compare=False)


@dataclass(eq=False, slots=True)
class WaitQueue:
    """Waiting callers, first come first, and slots, soonest first."""

    run: str
    weight: float
    waiters: deque[Waiter] = field(default_factory=deque)
    slots: list[Slot] = field(default_factory=list)

    @property
    def unreserved(self) -> int:
        """The number of callers for which no slot is reserved."""
        return max(0, len(self.waiters) - len(self.slots))

    def estimates(self, limit: int) -> tuple[int, ...]:
        """Return the token estimates of the first of these callers."""
        start = len(self.slots)
        return tuple(waiter.tokens for waiter in islice(self.waiters, start, start + limit))

    def next_waiter(self) -> Waiter | None:
        """Take out the first caller that still waits."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.future.done():
                return waiter
        return None

    def reserve(self, slot: Slot) -> None:
        """Add a slot in its order."""
        insort(self.slots, slot)

    def take_surplus(self) -> list[Slot]:
        """Take out the latest slots, as many as there are more slots than callers."""
        surplus = self.slots[len(self.waiters) :]
        del self.slots[len(self.waiters) :]
        return surplus

    def drop_before(self, at: float) -> int:
        """Remove the slots before a time; return their number."""
        kept = [slot for slot in self.slots if slot.at >= at]
        dropped = len(self.slots) - len(kept)
        self.slots = kept
        return dropped
