"""The limiter of an endpoint and model, bound to one run.

It has the shape that model clients expect (`CallLimiter` in `workers/llm/call_limits.py`), which
does not know runs.
"""

from __future__ import annotations

from pipeline.limits.lease import Lease
from pipeline.limits.limiter import Limiter


class RunLimiter:
    """The calls of one run to one endpoint and model."""

    def __init__(self, limiter: Limiter, *, run: str, weight: float) -> None:
        self._limiter = limiter
        self._run = run
        self._weight = weight
        self.acquire_at_once = limiter.acquire_at_once
        self.note_rate_limited = limiter.note_rate_limited

    async def acquire(self, estimated_tokens: int) -> Lease:
        """Wait until a call of about this size may be made, without a time limit."""
        return await self._limiter.acquire(
            run=self._run, weight=self._weight, estimated_tokens=estimated_tokens
        )
