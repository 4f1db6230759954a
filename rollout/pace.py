"""The pace of a run: rollouts and tokens per second, and the remaining time.

`panel.py` uses it. Must not: read a clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: The rates are those of the last seconds, so that they follow changes.
_WINDOW_S = 120.0
#: Shorter periods give no useful rate.
_LEAST_S = 1.0


class _Sample(NamedTuple):
    at_s: float
    done: int
    tokens: int


class Pace:
    """Keeps the figures of the last two minutes."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def add(self, at_s: float, *, done: int, tokens: int) -> None:
        """Add the numbers of finished rollouts and of their tokens at a time."""
        self._samples.append(_Sample(at_s, done, tokens))
        while at_s - self._samples[0].at_s > _WINDOW_S:
            self._samples.popleft()

    @property
    def rollouts_per_s(self) -> float | None:
        """Rollouts that ended per second; None while the period is too short."""
        first, last = self._samples[0], self._samples[-1]
        return self._rate(last.done - first.done)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of ended attempts per second; None while the period is too short."""
        first, last = self._samples[0], self._samples[-1]
        return self._rate(last.tokens - first.tokens)

    def left_s(self, n_open: int) -> float | None:
        """Return the remaining time at this pace; None while no rollout has ended."""
        rate = self.rollouts_per_s
        return n_open / rate if rate and rate > 0 else None

    def _rate(self, n: int) -> float | None:
        over_s = self._samples[-1].at_s - self._samples[0].at_s
        return n / over_s if over_s >= _LEAST_S else None
