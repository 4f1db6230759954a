"""The wall clock of an agent phase, and the task in which the agent runs under it.

Used by `execution.py`. The clock is paused while a model call waits for a rate limit, at any depth
of the agent's code. Agent code that swallows its cancellation gets a grace period; then the attempt
continues without it. Must not: decide which error a timeout is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Time for an agent's own clean-up after its cancellation.
CANCEL_GRACE_S = 10.0

#: Tasks that did not stop; asyncio keeps only weak references to tasks.
_unstopped: set[asyncio.Task[Any]] = set()

_current: ContextVar[WallClock | None] = ContextVar("wall_clock", default=None)


async def run_within(
    work: Coroutine[Any, Any, T],
    clock: WallClock,
    *,
    label: str,
    cancel_grace_s: float = CANCEL_GRACE_S,
) -> T:
    """Return the result of the work if it is done in time.

    Args:
        work: The agent's run.
        clock: The time that the work has; waits for limits do not count.
        label: Name of the attempt in the log if the work does not stop.
        cancel_grace_s: Time for the work to stop after its cancellation.

    Raises:
        TimeoutError: The work was not done in time, even if it swallowed its cancellation.
        asyncio.CancelledError: This task was cancelled, and so was the work.
    """
    task = asyncio.get_running_loop().create_task(_timed(work, clock))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=max(0.0, clock.left_s()) + cancel_grace_s)
            if not task.done() and clock.left_s() <= -cancel_grace_s:
                _abandon(task, label)
                raise TimeoutError
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=cancel_grace_s)
        if not task.done():
            _abandon(task, label)
        else:
            _retrieve(task)
        raise
    if clock.expired():
        _retrieve(task)
        raise TimeoutError
    return task.result()


async def off_the_clock(waiting: Awaitable[T]) -> T:
    """Return the result of an awaitable; the agent's wall clock is paused meanwhile."""
    clock = _current.get()
    if clock is None:
        return await waiting
    with clock.paused():
        return await waiting


class WallClock:
    """Ends its block with TimeoutError after `timeout_s` of working time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._pauses = 0
        self._left_s = timeout_s
        self._has_ended = False

    def expired(self) -> bool:
        """Whether the block ended by its timeout."""
        return self._timeout.expired()

    def left_s(self) -> float:
        """Return the remaining working time; negative after its end."""
        when = self._timeout.when()
        return self._left_s if when is None else when - asyncio.get_running_loop().time()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._token = _current.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        _current.reset(self._token)
        self._has_ended = True
        return await self._timeout.__aexit__(kind, error, trace)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock inside the block; several waits may overlap."""
        loop = asyncio.get_running_loop()
        when = self._timeout.when()
        # A task that outlives the block still has its clock, which can no longer be rescheduled.
        if self._pauses == 0 and when is not None and not self._has_ended:
            self._left_s = when - loop.time()
            self._timeout.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and not (self._has_ended or self._timeout.expired()):
                self._timeout.reschedule(loop.time() + self._left_s)


async def _timed(work: Coroutine[Any, Any, T], clock: WallClock) -> T:
    async with clock:
        return await work


def _abandon(task: asyncio.Task[Any], label: str) -> None:
    log.error("%s does not stop although it was cancelled; it is left behind.", label)
    _unstopped.add(task)
    task.add_done_callback(_unstopped.discard)
    task.add_done_callback(_retrieve)
    task.cancel()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, or asyncio logs it as never retrieved."""
    if not task.cancelled():
        task.exception()
