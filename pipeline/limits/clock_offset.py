"""The offset between the clocks of this process and of the Redis server, and the usual lateness.

Used by `Limiter` to sleep until a slot in the server's time. Wall clocks play no part, so a wrong
clock of a worker does no harm. Pure.
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
    """The offset by the quickest of the last round trips, wrong by at most half of it."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._lag_s = 0.0

    def note(self, *, sent_at: float, received_at: float, server_at: float) -> None:
        """Add one round trip, in this process's clock, and the server's time in between."""
        offset_s = (sent_at + received_at) / 2 - server_at
        round_trip_s = received_at - sent_at
        best = min(self._samples, default=None)
        if best and abs(offset_s - best.offset_s) > round_trip_s + best.round_trip_s:
            self._samples.clear()  # The server's clock was set: earlier samples are wrong.
        self._samples.append(_Sample(round_trip_s, offset_s))

    def local(self, server_at: float) -> float:
        """Convert a time of the server to this process's clock."""
        return server_at + min(self._samples).offset_s

    def note_lateness(self, late_s: float) -> None:
        """Add the lateness with which a slot was given to its caller."""
        self._lag_s += (late_s - self._lag_s) * LAG_WEIGHT

    @property
    def lag_s(self) -> float:
        """The usual lateness; slots that are all late by this much keep their distance."""
        return self._lag_s
