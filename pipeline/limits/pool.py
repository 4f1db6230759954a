"""The limiters of one worker process, one per endpoint and model.

The worker's composition opens a pool and hands its limiters to model clients. Without a Redis URL
limits hold per process, and a warning says so. Must not read settings or the environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Mapping

from pipeline.limits.limiter import LEASE_S, Limiter
from pipeline.limits.memory import MemoryLimitStore
from pipeline.limits.run_limiter import RunLimiter
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import endpoint_key
from pipeline.limits.store import PREFIX, LimitStore

_log = logging.getLogger(__name__)


class LimiterPool:
    """Limiters by endpoint and model, over one store.

    Args:
        store: Shared in Redis, or this process's own.
        process: Name of this process among all that share the store; made up by default.
        lease_s: Seconds after which the concurrency units of a silent process are given away.
    """

    def __init__(
        self,
        store: LimitStore | MemoryLimitStore,
        *,
        process: str = "",
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = store
        self._process = process or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lease_s = lease_s
        self._limiters: dict[tuple[str, str], Limiter] = {}

    def limiter(self, endpoint: str, model: str) -> Limiter:
        """Give the one limiter of this process for an endpoint and model."""
        key = endpoint_key(endpoint, model)
        if key not in self._limiters:
            self._limiters[key] = Limiter(
                self.store.ledger(endpoint, model),
                endpoint=key[0],
                model=key[1],
                process=self._process,
                lease_s=self._lease_s,
            )
        return self._limiters[key]

    def for_run(self, endpoint: str, model: str, *, run: str, weight: float = 1.0) -> RunLimiter:
        """Give that limiter as a model client of one run takes it."""
        return RunLimiter(self.limiter(endpoint, model), run=run, weight=weight)

    def describe(self) -> list[str]:
        """Say for every endpoint with waiting calls what they wait for."""
        return [limiter.describe() for limiter in self._limiters.values() if limiter.waiting]

    async def close(self) -> None:
        """Give everything back and close the connections."""
        await asyncio.gather(*(limiter.close() for limiter in self._limiters.values()))
        await self.store.close()


async def open_pool(
    redis_url: str | None,
    *,
    prefix: str = PREFIX,
    process: str = "",
    lease_s: float = LEASE_S,
    limits: Mapping[tuple[str, str], LimitSettings] | None = None,
) -> LimiterPool:
    """Open the limiters of a worker process.

    Args:
        redis_url: Where limits are shared; without it they hold for this process alone.
        prefix: Of every key, so that several deployments can share a server.
        process: Name of this process among all that share the limits; made up by default.
        lease_s: Seconds after which the concurrency units of a silent process are given away.
        limits: Put in force where none were ever set, by (endpoint, model).

    Raises:
        ConfigError: not a Redis URL.
        LedgerUnavailable: Redis does not answer, and there are limits to put in force.
    """
    if redis_url:
        store: LimitStore | MemoryLimitStore = LimitStore.connect(redis_url, prefix=prefix)
    else:
        store = MemoryLimitStore()
        _log.warning(
            "No Redis for limits: limits on model calls hold per worker process, "
            "so N processes together make up to N times as many calls."
        )
    pool = LimiterPool(store, process=process, lease_s=lease_s)
    try:
        for (endpoint, model), settings in (limits or {}).items():
            await store.seed(endpoint, model, settings)
    except BaseException:
        await pool.close()
        raise
    return pool
