"""A limiter as a model client takes it: bound to a run, one call to end a lease.

Satisfies `CallLimiter` of `workers/llm/call_limits.py`, which knows nothing of runs. Latency is
taken from grant to settlement.
"""

from __future__ import annotations

from pipeline.limits.lease import Lease, Outcome
from pipeline.limits.limiter import Limiter
from pipeline.limits.storm import Storm


class RunLease:
    """Leave to make one call."""

    def __init__(self, lease: Lease, storm: Storm) -> None:
        self._lease = lease
        self._storm = storm

    async def settle(self, actual_tokens: int, outcome: Outcome) -> None:
        """Replace the estimate by what the call really used, and end the lease."""
        if outcome == "ok":
            self._storm.answered()
        await self._lease.settle(actual_tokens)
        await self._lease.release(outcome)


class RunLimiter:
    """The calls of one run to one endpoint and model."""

    def __init__(self, limiter: Limiter, *, run: str, weight: float = 1.0) -> None:
        self._limiter = limiter
        self._run = run
        self._weight = weight

    async def acquire(self, estimated_tokens: int) -> RunLease:
        """Wait until a call of about this size may be made, for as long as it takes."""
        lease = await self._limiter.acquire(
            run=self._run, weight=self._weight, estimated_tokens=estimated_tokens
        )
        return RunLease(lease, self._limiter.storm)

    def acquire_at_once(self, estimated_tokens: int) -> RunLease | None:
        """Return leave to call where no limit is set, None where a call may have to wait."""
        lease = self._limiter.acquire_at_once(run=self._run, estimated_tokens=estimated_tokens)
        return None if lease is None else RunLease(lease, self._limiter.storm)

    async def note_rate_limited(self, retry_after_s: float | None) -> None:
        """Hold everybody's calls, if 429 is what most of them meet now.

        A stray one costs the call that met it a wait, and the adaptive cap a notch.
        """
        if self._limiter.storm.refused():
            await self._limiter.note_rate_limited(retry_after_s)

    def describe(self) -> str:
        """Say for a person what calls wait for now."""
        return self._limiter.describe()
