"""Worker processes for reward functions that are heavy on the CPU or may hang.

One process per core, started on demand and reused; a call that is cancelled or out of time kills
its process. `registry.score` calls `call_in_process`. Must not: run anything but functions that
the child can import by name.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Any

from pipeline.contract.errors import ContractError, RewardError

_CHILD_MODULE = "workers.rewards.reward_child"
_LENGTH_BYTES = 8
_pools: dict[asyncio.AbstractEventLoop, RewardProcesses] = {}


async def call_in_process(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function in one of the running loop's reward processes.

    Raises:
        ContractError: The function or an argument cannot be sent to another process.
        RewardError: The function raised, or its process died.
    """
    try:
        request = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ContractError(
            f"{function!r} cannot run in a process ({error}): define it at the top of a module.",
            code="reward_not_importable",
        ) from error
    return await _pool().call(request)


async def close_reward_processes() -> None:
    """End the running loop's reward processes; for the end of a process or of a test."""
    pool = _pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.close()


class RewardProcesses:
    """A pool of processes on one event loop.

    Args:
        size: Most processes, and so most calls, at a time.
    """

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Process] = []

    async def call(self, request: bytes) -> Any:
        """Send one pickled call and return its value."""
        async with self._slots:
            process = await self._take()
            try:
                answer = await _ask(process, request)
            except BaseException:
                # Cancelled, out of time, or dead: whatever it does now, nobody wants it.
                await _end(process)
                raise
            self._idle.append(process)
        is_value, value = pickle.loads(answer)
        if not is_value:
            raise RewardError(value)
        return value

    async def close(self) -> None:
        """End the idle processes; busy ones end with their calls."""
        while self._idle:
            await _end(self._idle.pop())

    async def _take(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return await _start()


def _pool() -> RewardProcesses:
    loop = asyncio.get_running_loop()
    pool = _pools.get(loop)
    if pool is None:
        for closed in [known for known in _pools if known.is_closed()]:
            del _pools[closed]
        pool = _pools[loop] = RewardProcesses(os.cpu_count() or 1)
    return pool


async def _start() -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        # The path first: it is where this very module may come from.
        f"import sys; sys.path[:] = {sys.path!r}; from {_CHILD_MODULE} import serve; serve()",
        stdin=PIPE,
        stdout=PIPE,
    )
    return process


async def _ask(process: Process, request: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(request).to_bytes(_LENGTH_BYTES, "big") + request)
        await process.stdin.drain()
        length = int.from_bytes(await process.stdout.readexactly(_LENGTH_BYTES), "big")
        return await process.stdout.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        code = await process.wait()
        raise RewardError(
            f"The reward's process ended with code {code} before it gave a value.",
            code="reward_process_died",
        ) from error


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
