"""Worker processes for reward functions that are CPU-bound or may hang.

The pool has one process per core, started on demand and reused. A call that is cancelled or exceeds
its time limit kills its process. `registry.score` calls `call_in_process`; `serve` is the program
of the processes. Must not run a function that cannot be imported by name.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import sys
import weakref
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Any, BinaryIO

from pipeline.contract.errors import ContractError, RewardError

_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1
_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, RewardProcesses] = (
    weakref.WeakKeyDictionary()
)


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
    pool = _pools.setdefault(asyncio.get_running_loop(), RewardProcesses(os.cpu_count() or 1))
    return await pool.call(request)


async def close_reward_processes() -> None:
    """End the running loop's reward processes, at the end of a process or test."""
    pool = _pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.close()


class RewardProcesses:
    """A pool of processes on one event loop.

    Args:
        size: Highest number of processes, and so of concurrent calls.
    """

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Process] = []

    async def call(self, request: bytes) -> Any:
        """Send one pickled call and return its value."""
        async with self._slots:
            process = await self._take()
            try:
                reply = await _ask(process, request)
            except BaseException:
                # After a cancellation or an error the process cannot serve another call.
                await _end(process)
                raise
            self._idle.append(process)
        is_value, value = pickle.loads(reply)
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
        # Set the path first, because this module may be importable only with it.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=PIPE, stdout=PIPE
        )


async def _ask(process: Process, request: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_framed(request))
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


def serve() -> None:
    """Answer the calls on stdin until it ends; a function's own output goes to stderr."""
    if sys.platform == "linux":
        # A process whose function never returns would not notice the end of stdin.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    while request := _read(requests):
        replies.write(_framed(_reply(request)))
        replies.flush()


def _reply(request: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(request)
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return _pickled(value)
    # Broad on purpose: any exception of the function, sys.exit included, goes to the parent.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return pickle.dumps((False, f"{type(error).__name__}: {error}"))


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps((True, value))
    # Broad on purpose: pickle's exceptions differ between types and Python versions.
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the reward returned a {kind} that cannot be pickled: {error}") from error


async def _awaited(value: Any) -> Any:
    return await value


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


def _read(requests: BinaryIO) -> bytes:
    head = requests.read(_LENGTH_BYTES)
    return requests.read(int.from_bytes(head, "big")) if len(head) == _LENGTH_BYTES else b""
