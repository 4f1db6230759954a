"""Limits of the Lua script under a clock of the test, and a process in front of them."""

from __future__ import annotations

from redis.asyncio import Redis

from pipeline.limits.shared_limits import SharedLimits, lua_source
from pipeline.limits.sync_messages import (
    Demand,
    ReturnedSlot,
    SyncReply,
    SyncRequest,
    Usage,
)

START = 1_700_000_000.0


class Clock:
    now = START


class ClockedLimits(SharedLimits):
    """Limits whose script reads the test's clock in place of the server's."""

    def __init__(
        self, client: Redis, prefix: str, clock: Clock, model: str, whole: ClockedLimits | None
    ) -> None:
        super().__init__(client, prefix, "http://e", model, of_endpoint=whole)
        source = lua_source()
        begin = source.index("  local time = redis.call('TIME')")
        end = source.index("\nend", begin)
        read = f"  return tonumber(redis.call('GET', '{prefix}:clock'))"
        self._grant_script = client.register_script(source[:begin] + read + source[end:])
        self._clock, self._clock_key = clock, f"{prefix}:clock"

    async def sync(self, request: SyncRequest) -> SyncReply:
        await self._client.set(self._clock_key, repr(self._clock.now))
        return await super().sync(request)


class Process:
    """A worker process in front of the script: counts the calls that it holds."""

    def __init__(self, limits: SharedLimits, name: str = "p") -> None:
        self.limits, self.name, self.held = limits, name, 0

    async def ask(
        self,
        calls: int = 0,
        *,
        run: str = "r",
        tokens: int = 0,
        weight: float = 1.0,
        returned: tuple[ReturnedSlot, ...] = (),
        usage: Usage | None = None,
        backoff_s: float | None = None,
    ) -> SyncReply:
        known = await self.limits.sync(SyncRequest(process=""))
        reply = await self.limits.sync(
            SyncRequest(
                process=self.name,
                version=known.version,
                endpoint_version=known.endpoint_version,
                held=self.held,
                demands=(Demand(run, weight, calls, (tokens,) * calls),),
                returned=returned,
                usage=usage or Usage(),
                backoff_s=backoff_s,
            )
        )
        self.held += len(reply.grants)
        return reply

    async def slots(self, calls: int, **options: object) -> list[float]:
        """Ask for calls; return when they start, in seconds from now."""
        reply = await self.ask(calls, **options)  # type: ignore[arg-type]
        return [grant.delay_s for grant in reply.grants]
