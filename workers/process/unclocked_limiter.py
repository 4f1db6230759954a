"""A run's limiter as the model clients of attempts use it: waits do not use the agent's time.

Made by the model clients' cache. Waits of a call that came over HTTP are bounded, because its HTTP
client has a timeout of its own. Must not: know the limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pipeline.contract.errors import ModelRateLimit
from pipeline.limits.local_pause import LocalPause
from pipeline.limits.pool import RunLimiter
from workers.gateway.rejections import LIMIT_WAIT
from workers.llm.call_limits import CallLease
from workers.process.agent_timeout import off_the_clock

_RETRY_AFTER_S = 5.0

_longest_wait_s: ContextVar[float | None] = ContextVar("longest_limit_wait_s", default=None)


@contextmanager
def bounded_waits(longest_wait_s: float) -> Iterator[None]:
    """Inside the block, a call that waits longer for its limits fails with a rate limit."""
    token = _longest_wait_s.set(longest_wait_s)
    try:
        yield
    finally:
        _longest_wait_s.reset(token)


def bounded_wait_s(wait_s: float) -> float:
    """Return the longest wait of the current call, which may be bounded below `wait_s`."""
    bound_s = _longest_wait_s.get()
    return wait_s if bound_s is None else min(bound_s, wait_s)


class UnclockedLimiter:
    """A run's limiter; its waits do not count against the attempt's wall clock."""

    def __init__(self, limiter: RunLimiter | LocalPause) -> None:
        self._limiter = limiter
        self.note_rate_limited = limiter.note_rate_limited

    async def acquire(self, estimated_tokens: int) -> CallLease:
        """Wait until the limits allow a call of about this many tokens.

        Raises:
            ModelRateLimit: The wait is bounded, and was longer.
        """
        lease = self._limiter.acquire_at_once(estimated_tokens)
        return lease or await off_the_clock(self._acquired(estimated_tokens))

    async def _acquired(self, estimated_tokens: int) -> CallLease:
        longest_wait_s = _longest_wait_s.get()
        if longest_wait_s is None:
            return await self._limiter.acquire(estimated_tokens)
        try:
            async with asyncio.timeout(longest_wait_s):
                return await self._limiter.acquire(estimated_tokens)
        except TimeoutError:
            raise ModelRateLimit(
                f"The limits of this endpoint did not allow the call within {longest_wait_s:g} s.",
                code=LIMIT_WAIT,
                retry_after_s=_RETRY_AFTER_S,
            ) from None
