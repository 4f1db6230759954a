"""The one task of a limiter that talks to Redis: runs each sync when it is due, also after outages.

`Limiter` supplies the sync and the time of the next one. A failed sync is logged once per outage
and repeated with growing delays until it succeeds; limited calls wait meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pipeline.contract.errors import PipelineError

RETRY_FIRST_S, RETRY_LAST_S = 0.1, 2.0
REMIND_S = 30.0

_log = logging.getLogger(__name__)


class SyncLoop:
    """Runs `sync` whenever `due()` has come, in the event loop that first wakes it."""

    def __init__(
        self, sync: Callable[[], Awaitable[None]], due: Callable[[], float], *, name: str
    ) -> None:
        self.is_outage = False
        self._sync = sync
        self._due = due
        self._name = name
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._since = self._logged_at = 0.0
        self._delay_s = RETRY_FIRST_S

    def wake(self) -> None:
        """Evaluate `due()` again; one sync serves all callers of the same tick."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"limits {self._name}"
            )
        self._changed.set()

    async def stop(self) -> None:
        """End the task."""
        # The flag too: on Python 3.11 `asyncio.wait_for`, which the Redis client uses, can swallow
        # a cancellation that arrives together with its result.
        self._is_stopping = True
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while not self._is_stopping:
            await self._wait_until_due()
            try:
                await self._sync()
            # A service loop: after any error of a sync, the waiting callers still need the next.
            except Exception as error:
                await self._wait_after(error)
            else:
                self._end_outage()

    async def _wait_until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while (left_s := self._due() - loop.time()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left_s, 3600.0)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _wait_after(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if not self.is_outage:
            self.is_outage = True
            self._since, self._logged_at, self._delay_s = now, now, RETRY_FIRST_S
            _log.warning(
                "Limits of %s: %s Calls wait; trying again.",
                self._name,
                error,
                # A traceback is for bugs; the message of an unreachable server says enough.
                exc_info=None if isinstance(error, PipelineError) else error,
            )
        elif now - self._logged_at > REMIND_S:
            self._logged_at = now
            outage_s = now - self._since
            _log.warning(
                "Limits of %s: still unavailable after %.0f s. %s", self._name, outage_s, error
            )
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(self._delay_s * 2, RETRY_LAST_S)

    def _end_outage(self) -> None:
        if self.is_outage:
            self.is_outage = False
            outage_s = asyncio.get_running_loop().time() - self._since
            _log.warning("Limits of %s: available again after %.1f s.", self._name, outage_s)
