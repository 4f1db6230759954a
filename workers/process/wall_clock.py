"""The wall clock of an agent phase, which stands still while a model call waits for its turn.

A wait for a rate limit must not be held against the rollout. Set by `execution.py`, paused by the
model calls made under it, however deep. Must not: know what is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

_current: ContextVar[WallClock | None] = ContextVar("wall_clock", default=None)


class WallClock:
    """Ends its block with TimeoutError after `timeout_s` of working time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._pauses = 0
        self._left_s = timeout_s

    def expired(self) -> bool:
        """Whether the block ended because the time was over."""
        return self._timeout.expired()

    def left_s(self) -> float:
        """Return the working time that is left; below zero, for how long it has been over."""
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
        return await self._timeout.__aexit__(kind, error, trace)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still meanwhile; several waits may overlap."""
        loop = asyncio.get_running_loop()
        when = self._timeout.when()
        if self._pauses == 0 and when is not None:
            self._left_s = when - loop.time()
            self._timeout.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and not self._timeout.expired():
                self._timeout.reschedule(loop.time() + self._left_s)


async def off_the_clock(waiting: Awaitable[T]) -> T:
    """Await something that is no fault of the agent's."""
    clock = _current.get()
    if clock is None:
        return await waiting
    with clock.paused():
        return await waiting
