"""How fast a run goes, seen by whoever watches it: rollouts and tokens per second, time to the end.

Used by `progress.py`. Must not: read a clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Figures are those of so many seconds at most, so that they follow what changes.
_WINDOW_S = 120.0
#: Less than this says nothing yet.
_LEAST_S = 1.0


class _Look(NamedTuple):
    at_s: float
    done: int
    tokens: int


class Pace:
    """Remembers what was seen in the last two minutes."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def add(self, at_s: float, *, done: int, tokens: int) -> None:
        """Note how many rollouts are done, and how many tokens they took, at a moment."""
        self._looks.append(_Look(at_s, done, tokens))
        while at_s - self._looks[0].at_s > _WINDOW_S:
            self._looks.popleft()

    @property
    def rollouts_per_s(self) -> float | None:
        """Rollouts that ended in a second; None: too early to say."""
        first, last = self._looks[0], self._looks[-1]
        return self._rate(last.done - first.done)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of attempts that ended in a second; None: too early to say."""
        first, last = self._looks[0], self._looks[-1]
        return self._rate(last.tokens - first.tokens)

    def left_s(self, n_open: int) -> float | None:
        """Return the time to the end at this pace; None while nothing has ended."""
        rate = self.rollouts_per_s
        return n_open / rate if rate and rate > 0 else None

    def _rate(self, n: int) -> float | None:
        over_s = self._looks[-1].at_s - self._looks[0].at_s
        return n / over_s if over_s >= _LEAST_S else None
