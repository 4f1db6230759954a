"""Tells a storm of 429s from a stray one.

An endpoint at its limit refuses most calls, and everybody should pause. A gateway that refuses one
call in twenty should cost that call a wait, not stop all others: with 10 % injected errors a pause
for each made a run of 1,000 rollouts take 155 s instead of 8 (docs/performance.md).
"""

from __future__ import annotations

from collections import deque

#: Calls remembered, and how many refusals, and what share of them, make a storm.
_REMEMBERED = 20
_STORM_SHARE = 0.5
_STORM_LEAST = 3


class Storm:
    """What the last calls of this process to one endpoint came to."""

    def __init__(self) -> None:
        self._refused: deque[bool] = deque(maxlen=_REMEMBERED)

    def answered(self) -> None:
        """Note a call that was answered."""
        self._refused.append(False)

    def refused(self) -> bool:
        """Note a 429; return whether most calls meet one now."""
        self._refused.append(True)
        refused = sum(self._refused)
        return refused >= max(_STORM_LEAST, _STORM_SHARE * len(self._refused))
