"""An agent at work in a task of its own, so that one that will not stop can be left behind.

Used by `execution.py`. The wall clock runs inside the task; foreign code that swallows its
cancellation gets a moment more, then the attempt goes on without it. Must not: name errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from workers.process.wall_clock import WallClock

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Time for an agent's own clean-up after it was told to stop.
CANCEL_GRACE_S = 10.0

#: Tasks that were left behind; asyncio itself keeps weak references only.
_left_behind: set[asyncio.Task[Any]] = set()


async def run_within(
    work: Coroutine[Any, Any, T],
    timeout_s: float,
    *,
    label: str,
    cancel_grace_s: float = CANCEL_GRACE_S,
) -> T:
    """Return what the work returns, as long as it is done in time.

    Args:
        work: The agent's run.
        timeout_s: Its wall clock; waits for limits do not count.
        label: Named in the log when it has to be left behind.
        cancel_grace_s: How long it may take to stop.

    Raises:
        TimeoutError: It was not done in time, whatever it made of its cancellation.
        asyncio.CancelledError: This task was cancelled, and so was the work.
    """
    clock = WallClock(timeout_s)
    task = asyncio.get_running_loop().create_task(_timed(work, clock))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=max(0.0, clock.left_s()) + cancel_grace_s)
            if not task.done() and clock.left_s() <= -cancel_grace_s:
                _leave_behind(task, label)
                raise TimeoutError
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=cancel_grace_s)
        if not task.done():
            _leave_behind(task, label)
        else:
            _retrieve(task)
        raise
    if clock.expired():
        _retrieve(task)
        raise TimeoutError
    return task.result()


async def _timed(work: Coroutine[Any, Any, T], clock: WallClock) -> T:
    async with clock:
        return await work


def _leave_behind(task: asyncio.Task[Any], label: str) -> None:
    log.error("%s does not stop although it was cancelled; it is left behind.", label)
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)
    task.add_done_callback(_retrieve)
    task.cancel()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at the exception, or asyncio complains that nobody did."""
    if not task.cancelled():
        task.exception()
