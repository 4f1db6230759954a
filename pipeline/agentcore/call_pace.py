"""The pace of calls to a remote agent's service, which all processes keep together through Redis.

Workers wait here before an invocation, the service in `sessions.py` before a stop: the service
counts both against one quota. Belongs to one event loop. Must not: make a call.
"""

from __future__ import annotations

import asyncio

from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.errors import ConfigError
from pipeline.limits.limiter import Limiter
from pipeline.limits.pool import LimiterPool
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import endpoint_key
from pipeline.settings import Settings

#: Share of the service's rate that is used: callers that wake late, and calls that the network
#: delays, must not make the busiest second one call too many.
_PACE = 0.92

#: The calls of one account and region, as `rollout limits show` lists them.
_CALLS = "invoke+stop"


def require_shared_pace(settings: Settings) -> str:
    """Return the Redis through which processes share the pace.

    Raises:
        ConfigError: There is none.
    """
    url = settings.limits_redis_url
    if url is None:
        raise ConfigError(
            "Runs on AgentCore need a Redis: all processes keep the service's rate together.",
            remedy="Set ROLLOUT_LIMITS__REDIS_URL for the workers and the controller.",
            code="E127",
        )
    return url


def limits_of(requests_per_second: float) -> LimitSettings:
    """Return limits under which no second sees more calls than this, late ones included."""
    per_second = requests_per_second * _PACE
    return LimitSettings(requests_per_minute=max(1, int(per_second * 60)), burst=1)


class CallPace:
    """The shared pace of one process.

    Args:
        pool: Of this process.
        requests_per_second: Of all processes together, for each account and region.
    """

    def __init__(self, pool: LimiterPool, requests_per_second: float) -> None:
        self._pool = pool
        self._limits = limits_of(requests_per_second)
        self._limiters: dict[str, asyncio.Task[Limiter]] = {}

    async def wait(self, target: AgentCoreTarget, *, run: str, weight: float = 1.0) -> None:
        """Wait until a call may be made."""
        limiter = await self._limiter(target)
        lease = await limiter.acquire(run=run, weight=weight, estimated_tokens=0)
        lease.settle(0, "ok")

    async def note_throttled(self, target: AgentCoreTarget) -> None:
        """Pause the calls of all processes if most of them are throttled now."""
        (await self._limiter(target)).note_rate_limited(None)

    async def _limiter(self, target: AgentCoreTarget) -> Limiter:
        scope = target.quota_scope
        if scope not in self._limiters:
            self._limiters[scope] = asyncio.create_task(self._open(scope))
        try:
            return await asyncio.shield(self._limiters[scope])
        except Exception:
            self._limiters.pop(scope, None)
            raise

    async def _open(self, scope: str) -> Limiter:
        key = endpoint_key(scope, _CALLS)
        limiter = self._pool.limiter(*key)
        await limiter.shared.restore(self._limits)
        for status in await self._pool.store.show():
            is_other = status.settings != self._limits
            if (status.endpoint, status.model) == key and is_other:
                await limiter.shared.set(self._limits)
        return limiter
