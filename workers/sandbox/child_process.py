"""Runs one child process to its end: bounded output, a time limit, a kill of its descendants.

Called by the local sandboxes, on any event loop in any thread. The exit is awaited by a pidfd and
not by asyncio's child watchers, which reap a child before its process group can be killed safely.
Must not know the command, or the sandbox that runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO, NamedTuple

from workers.sandbox.base import (
    DISK_FULL_EXIT_CODE,
    OUT_OF_MEMORY_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    CommandResult,
    SandboxFailure,
    SandboxLimits,
)
from workers.sandbox.child_pipes import PipeReader, PipeWriter, make_status_pipe
from workers.sandbox.disk_quota import DiskQuota
from workers.sandbox.process_table import tree_memory

#: Niceness of commands, below which the worker's event loop has priority.
NICENESS = 5
_SETTLE_S = 5.0
_CHECK_S = 0.25
_STATUS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The process to start.

    Args:
        argv: Program and arguments; `{status_fd}` in it is replaced by the status pipe's number.
        env: The whole environment.
        cwd: Working directory of the child itself.
        kill: Kills everything the child started; called with the child's pid before the child is
            reaped, after its end as well as at its timeout.
        has_status: Whether the child gets a third pipe to report on.
        user_id: User and group the child becomes; None stays the worker's own.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    kill: Callable[[int], None]
    has_status: bool = False
    user_id: int | None = None


class FinishedChild(NamedTuple):
    """The end of a child, and its report on the status pipe.

    Args:
        result: The command's result.
        status: The report; empty without a status pipe.
        was_killed: Whether it ran out of time, memory or disk.
    """

    result: CommandResult
    status: str
    was_killed: bool


async def run_child(
    spec: ChildSpec,
    limits: SandboxLimits,
    *,
    stdin: bytes | None,
    timeout_s: float | None,
    quota: DiskQuota,
) -> FinishedChild:
    """Run a child until it ends or its time is over; none of its descendants outlives the call.

    A child whose processes together hold more than `limits.memory_bytes`, or that uses up the
    quota, is killed as well. That is checked every quarter of a second, so for that long it may use
    more. The quota is also checked at the end.

    Args:
        spec: The process to start.
        limits: Its limits.
        stdin: Bytes to feed; None is an empty input.
        timeout_s: Wall-clock time, bounded by `limits.wall_s`, its default.
        quota: The disk quota of the sandbox.

    Raises:
        SandboxFailure: The child would not start.
    """
    started = time.monotonic()
    wall_s = limits.bound_wall_s(timeout_s)
    disk_bytes = quota.allowed_bytes
    child = _Child(spec, limits.output_bytes, stdin)
    excess: _Excess | None = None
    try:
        while not await child.wait_exited(min(_CHECK_S, started + wall_s - time.monotonic())):
            running_s = time.monotonic() - started
            if running_s >= wall_s:
                excess = _Excess.TIME
            elif tree_memory(child.pid) > limits.memory_bytes:
                excess = _Excess.MEMORY
            elif await quota.is_exceeded(disk_bytes, child.pid, running_s):
                excess = _Excess.DISK
            if excess:
                break
    finally:
        await child.end()
    duration_s = time.monotonic() - started
    if not excess and await quota.is_exceeded(disk_bytes, 0, duration_s, has_ended=True):
        excess = _Excess.DISK
    return child.finished(excess, limits, duration_s)


class _Excess(Enum):
    """A limit that a child exceeded, with its exit code."""

    TIME = TIMEOUT_EXIT_CODE
    MEMORY = OUT_OF_MEMORY_EXIT_CODE
    DISK = DISK_FULL_EXIT_CODE

    def notice(self, limits: SandboxLimits) -> str:
        """Return the line that is added to stderr."""
        if self is _Excess.MEMORY:
            return "\n[killed: its processes together used too much memory]\n"
        if self is _Excess.DISK:
            megabytes = limits.disk_bytes // 1024**2
            return (
                f"\n[killed: the sandbox's disk quota of {megabytes} MB is used up; delete files "
                "that are not needed]\n"
            )
        return ""


class _Child:
    """A running child with its pipes on the current event loop."""

    def __init__(self, spec: ChildSpec, output_bytes: int, stdin: bytes | None) -> None:
        self._kill = spec.kill
        self._has_exited = False
        self._process, status = _start(spec, has_stdin=stdin is not None)
        self._stdout = PipeReader(self._process.stdout, output_bytes)
        self._stderr = PipeReader(self._process.stderr, output_bytes)
        self._status = PipeReader(status, _STATUS_BYTES) if status else None
        self._stdin = None if stdin is None else PipeWriter(self._process.stdin, stdin)

    @property
    def pid(self) -> int:
        """The child's process id, which no other process can get before `end`."""
        return self._process.pid

    async def wait_exited(self, timeout_s: float) -> bool:
        """Wait until the child itself has exited; returns whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _wait_exit(self._process.pid)
            self._has_exited = True
        return self._has_exited

    async def end(self) -> None:
        """Kill the remaining processes, reap the child, and close the pipes."""
        readers = [self._stdout, self._stderr, *([self._status] if self._status else ())]
        try:
            # Before the reaping: until then the pid, and the group of its name, cannot be reused.
            self._kill(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            if not self._has_exited:
                await _wait_exit(self._process.pid)
            # A pipe ends with its last writer, so this also waits for the descendants.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    for reader in readers:
                        await reader.closed.wait()
        finally:
            for pipe in (*readers, *([self._stdin] if self._stdin else ())):
                pipe.close()
            self._process.wait()

    def finished(
        self, excess: _Excess | None, limits: SandboxLimits, duration_s: float
    ) -> FinishedChild:
        """Return the outcome, after `end`."""
        out, err = self._stdout.capture, self._stderr.capture
        code, stderr = self._process.returncode, err.text()
        code = code if code >= 0 else 128 - code
        if excess:
            code, stderr = excess.value, stderr + excess.notice(limits)
        result = CommandResult(
            exit_code=code,
            stdout=out.text(),
            stderr=stderr,
            timed_out=excess is _Excess.TIME,
            truncated=out.is_truncated or err.is_truncated,
            duration_s=duration_s,
        )
        status = self._status.capture.text() if self._status else ""
        return FinishedChild(result, status, excess is not None)


def _start(spec: ChildSpec, *, has_stdin: bool) -> tuple[subprocess.Popen[bytes], BinaryIO | None]:
    """Start the child; return the child, and the read end of the status pipe."""
    status, status_fd, argv = None, -1, spec.argv
    try:
        if spec.has_status:
            status, status_fd = make_status_pipe()
            argv = [argument.replace("{status_fd}", str(status_fd)) for argument in argv]
        process = subprocess.Popen(
            argv,
            bufsize=0,
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=spec.env,
            cwd=spec.cwd,
            start_new_session=True,
            pass_fds=(status_fd,) if spec.has_status else (),
            user=spec.user_id,
            group=spec.user_id,
            extra_groups=None if spec.user_id is None else (),
        )
    except (OSError, ValueError) as error:
        if status:
            status.close()
        raise SandboxFailure(f"The sandbox would not start: {error}") from error
    finally:
        if status_fd >= 0:
            os.close(status_fd)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return process, status


async def _wait_exit(pid: int) -> None:
    """Wait for a child's exit without reaping it."""
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            await asyncio.sleep(0.01)
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
