"""How far this process's clock is from the ledger's, and how late its callers usually wake.

Used by `Limiter` to sleep until a slot named in the ledger's time. Wall clocks play no part, so a
worker whose clock is wrong is not affected. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SAMPLES = 16
LAG_WEIGHT = 0.2


class _Sample(NamedTuple):
    round_trip_s: float
    offset_s: float


class ClockOffset:
    """Offset by the quickest of the last round trips, which bounds its error by half of it."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._lag_s = 0.0

    def note(self, *, sent_at: float, received_at: float, ledger_at: float) -> None:
        """Take in one round trip, in this process's clock, and the ledger's time in between."""
        offset_s = (sent_at + received_at) / 2 - ledger_at
        round_trip_s = received_at - sent_at
        best = min(self._samples, default=None)
        if best and abs(offset_s - best.offset_s) > round_trip_s + best.round_trip_s:
            self._samples.clear()  # The ledger's clock was set: what was known is void.
        self._samples.append(_Sample(round_trip_s, offset_s))

    def local(self, ledger_at: float) -> float:
        """Turn a time of the ledger into one of this process."""
        return ledger_at + min(self._samples).offset_s

    def note_lateness(self, late_s: float) -> None:
        """Take in how late a slot was handed out."""
        self._lag_s += (late_s - self._lag_s) * LAG_WEIGHT

    @property
    def lag_s(self) -> float:
        """Usual lateness; slots that are all late by this much still keep their distance."""
        return self._lag_s
