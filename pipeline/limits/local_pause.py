"""A pause after 429s for the model calls of one process, where no Redis is set for limits.

Limits need Redis (`pool.py`). Without it, calls are unlimited except for this pause. A refused call
also waits by itself before it is tried again (`workers/llm/call_retries.py`), longer each time.
"""

from __future__ import annotations

import asyncio
import math
import random

from pipeline.limits.lease import CallStatus
from pipeline.limits.limiter import RESUME_SPREAD_S
from pipeline.limits.rate_limit_detector import RateLimitDetector

PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


class LocalPause:
    """The calls of this process to one endpoint and model; also the lease of each of them."""

    def __init__(self) -> None:
        self._detector = RateLimitDetector()
        self._paused_until = -math.inf

    async def acquire(self, estimated_tokens: int) -> LocalPause:
        """Wait until no pause is left."""
        loop = asyncio.get_running_loop()
        while (left_s := self._paused_until - loop.time()) > 0:
            await asyncio.sleep(left_s + random.uniform(0, RESUME_SPREAD_S))
        return self

    def acquire_at_once(self, estimated_tokens: int) -> LocalPause | None:
        """Return a lease, or None during a pause."""
        return self if self._paused_until <= asyncio.get_running_loop().time() else None

    def settle(self, actual_tokens: int, outcome: CallStatus) -> None:
        """Note how a call ended."""
        if outcome == "ok":
            self._detector.note_answered()

    def note_rate_limited(self, retry_after_s: float | None) -> None:
        """Pause all calls if most of them are answered 429 now."""
        if self._detector.note_refused():
            pause_s = min(retry_after_s or PAUSE_S, MAX_PAUSE_S)
            now = asyncio.get_running_loop().time()
            self._paused_until = max(self._paused_until, now + pause_s)


class LocalPauses:
    """The pauses of a worker process, one per endpoint and model; used like a `LimiterPool`."""

    def __init__(self) -> None:
        self._pauses: dict[tuple[str, str], LocalPause] = {}

    def for_run(self, endpoint: str, model: str, *, run: str, weight: float) -> LocalPause:
        """Return the pause of an endpoint and model; all runs share it."""
        return self._pauses.setdefault((endpoint, model), LocalPause())

    async def close(self) -> None:
        """Do nothing: no connection is open."""
