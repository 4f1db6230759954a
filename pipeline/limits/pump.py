"""The one task of a limiter that talks to the ledger: when it is due, and through outages.

`Limiter` says what a step does and when the next is due. A step that fails is logged once per
outage and repeated with growing pauses for as long as it takes; nobody is let through meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pipeline.contract.errors import PipelineError

RETRY_FIRST_S, RETRY_LAST_S = 0.1, 2.0
REMIND_S = 30.0

_log = logging.getLogger(__name__)


class Pump:
    """Runs `step` whenever `due()` has come, in the loop that first wakes it."""

    def __init__(
        self, step: Callable[[], Awaitable[None]], due: Callable[[], float], *, name: str
    ) -> None:
        self.outage: Exception | None = None
        self._step = step
        self._due = due
        self._name = name
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._since = self._reminded_at = 0.0
        self._pause_s = RETRY_FIRST_S

    def wake(self) -> None:
        """Look at `due()` again; callers of the same tick are served by one step."""
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
                await self._step()
            # A service loop: whatever a step raises, the callers that wait must not wait for ever.
            except Exception as error:
                await self._sit_out(error)
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

    async def _sit_out(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if self.outage is None:
            self._since, self._reminded_at, self._pause_s = now, now, RETRY_FIRST_S
            # A traceback is for bugs; an unreachable server has said all in its message.
            _log.warning(
                "Limits of %s: %s Calls wait; trying again.",
                self._name,
                error,
                exc_info=None if isinstance(error, PipelineError) else error,
            )
        elif now - self._reminded_at > REMIND_S:
            self._reminded_at = now
            _log.warning(
                "Limits of %s: still unavailable after %.0f s. %s",
                self._name,
                now - self._since,
                error,
            )
        self.outage = error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, RETRY_LAST_S)

    def _end_outage(self) -> None:
        if self.outage is not None:
            now = asyncio.get_running_loop().time()
            _log.warning(
                "Limits of %s: available again after %.1f s.", self._name, now - self._since
            )
            self.outage = None
