"""Tells whether most calls of this process to an endpoint are answered 429 now.

An endpoint at its limit refuses most calls, so all calls should pause. A gateway that refuses one
call in twenty should delay that call only: with 10 % injected errors, a pause after each 429 made a
run of 1,000 rollouts take 155 s instead of 8 s (docs/performance.md).
"""

from __future__ import annotations

from collections import deque

#: Calls remembered; of these, at least this share and at least this many were refused.
_REMEMBERED = 20
_MIN_SHARE = 0.5
_MIN_REFUSED = 3


class RateLimitDetector:
    """The last calls of this process to one endpoint and model: answered or refused."""

    def __init__(self) -> None:
        self._refused: deque[bool] = deque(maxlen=_REMEMBERED)

    def note_answered(self) -> None:
        """Note a call that was answered."""
        self._refused.append(False)

    def note_refused(self) -> bool:
        """Note a 429; return whether most calls are refused now."""
        self._refused.append(True)
        refused = sum(self._refused)
        return refused >= max(_MIN_REFUSED, _MIN_SHARE * len(self._refused))
