"""The callers of one run that wait in this process, and the slots reserved for them.

A slot belongs to the run, not to a caller: whoever is first when it is due takes it, so a caller
that stops waiting leaves no hole. Used by `Limiter`, which owns time and the ledger.
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
    since: float
    future: asyncio.Future[Lease]


@dataclass(order=True, slots=True)
class Slot:
    """A time at which one call may start."""

    at: float  #: in this process's clock
    ledger_at: float = field(compare=False)
    tokens: int = field(compare=False)
    expires_at: float = field(compare=False)


@dataclass(eq=False, slots=True)
class Line:
    """One run's waiting callers, first come first, and its slots, soonest first."""

    run: str
    weight: float
    waiters: deque[Waiter] = field(default_factory=deque)
    slots: list[Slot] = field(default_factory=list)

    @property
    def unreserved(self) -> int:
        """Count the callers that no slot is reserved for."""
        return max(0, len(self.waiters) - len(self.slots))

    def estimates(self, most: int) -> tuple[int, ...]:
        """Give the token estimates of the first of them."""
        start = len(self.slots)
        return tuple(waiter.tokens for waiter in islice(self.waiters, start, start + most))

    def reserve(self, slot: Slot) -> None:
        """Add a slot in its order."""
        insort(self.slots, slot)

    def take_surplus(self) -> list[Slot]:
        """Take out the latest slots that nobody waits for any more."""
        surplus = self.slots[len(self.waiters) :]
        del self.slots[len(self.waiters) :]
        return surplus

    def drop_before(self, at: float) -> int:
        """Forget the slots before a time; say how many."""
        kept = [slot for slot in self.slots if slot.at >= at]
        dropped = len(self.slots) - len(kept)
        self.slots = kept
        return dropped
