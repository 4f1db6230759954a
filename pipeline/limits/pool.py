"""The limiters of one worker process, one per endpoint and model, over one Redis.

The worker opens a pool and hands its limiters to model clients. Without a Redis URL it uses
`local_pause.py` instead. Must not read settings or the environment.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid

from pipeline.limits.lease import Lease
from pipeline.limits.limiter import Limiter
from pipeline.limits.status import endpoint_key
from pipeline.limits.store import PREFIX, LimitStore

LEASE_S = 15.0


class RunLimiter:
    """The limiter of an endpoint and model for the calls of one run.

    It has the shape that model clients expect: `CallLimiter` in `workers/llm/call_limits.py`, which
    has no runs.
    """

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


class LimiterPool:
    """Limiters by endpoint and model; connects on first use.

    Args:
        redis_url: Where limits are shared.
        prefix: Of every key, so that several deployments can share a server.
        process: Name of this process among all that share the limits; made up by default.
        lease_s: Seconds after which the concurrency units of a silent process are given away.

    Raises:
        ConfigError: Not a Redis URL.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        prefix: str = PREFIX,
        process: str = "",
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = LimitStore.connect(redis_url, prefix=prefix)
        self._process = process or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lease_s = lease_s
        self._limiters: dict[tuple[str, str], Limiter] = {}

    def limiter(self, endpoint: str, model: str) -> Limiter:
        """Return the one limiter of this process for an endpoint and model."""
        key = endpoint_key(endpoint, model)
        if key not in self._limiters:
            self._limiters[key] = Limiter(
                self.store.limits_of(*key),
                name=f"{key[1]} at {key[0]}",
                process=self._process,
                lease_s=self._lease_s,
            )
        return self._limiters[key]

    def for_run(self, endpoint: str, model: str, *, run: str, weight: float) -> RunLimiter:
        """Return that limiter for the calls of one run."""
        return RunLimiter(self.limiter(endpoint, model), run=run, weight=weight)

    async def close(self) -> None:
        """Give all units back and close the connections."""
        await asyncio.gather(*(limiter.close() for limiter in self._limiters.values()))
        await self.store.close()
