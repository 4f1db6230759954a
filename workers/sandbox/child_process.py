"""Runs one child process to its end: bounded output, a wall clock, and a kill of what it started.

Called by the local sandboxes, on any event loop in any thread. It waits for the exit by a pidfd and
not by asyncio's child watchers, which reap a child before its process group can be killed safely.
Must not know what the command is, or which sandbox runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, BinaryIO, NamedTuple

from workers.sandbox.base import (
    DISK_FULL_EXIT_CODE,
    OUT_OF_MEMORY_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    CommandResult,
    SandboxFailure,
    SandboxLimits,
)
from workers.sandbox.capture import BoundedCapture
from workers.sandbox.disk_quota import DiskQuota
from workers.sandbox.process_table import tree_memory

#: Of commands: the worker's event loop must stay ahead of what it runs.
NICENESS = 5
_SETTLE_S = 5.0
_CHECK_S = 0.25
_CHUNK = 256 * 1024
_STATUS_BYTES = 4096
#: Scripts use single digits for descriptors of their own.
_FIRST_STATUS_FD = 10


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start.

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
    """How a child ended, and its report on the status pipe.

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
    quota: DiskQuota | None = None,
) -> FinishedChild:
    """Run a child until it ends or its time is over; nothing it started is left behind.

    A child whose processes together hold more than `limits.memory_bytes`, or that uses up the
    quota, is killed as well. That is checked every quarter of a second, so for that long it may use
    more. The quota is also checked at the end.

    Args:
        spec: What to start.
        limits: What it may use.
        stdin: Bytes to feed; None is an empty input.
        timeout_s: Wall-clock time, bounded by `limits.wall_s`, its default.
        quota: The disk quota of the sandbox.

    Raises:
        SandboxFailure: The child would not start.
    """
    started = time.monotonic()
    wall_s = limits.bound_wall_s(timeout_s)
    disk_bytes = quota.allowed_bytes if quota else 0
    child = _Child(spec, limits.output_bytes, stdin)
    excess: _Excess | None = None
    try:
        while not await child.wait_exited(min(_CHECK_S, started + wall_s - time.monotonic())):
            running_s = time.monotonic() - started
            if running_s >= wall_s:
                excess = _Excess.TIME
            elif child.memory() > limits.memory_bytes:
                excess = _Excess.MEMORY
            elif quota and await quota.is_exceeded(disk_bytes, child.pid, running_s):
                excess = _Excess.DISK
            if excess:
                break
    finally:
        await child.end()
    duration_s = time.monotonic() - started
    if quota and not excess and await quota.is_exceeded(disk_bytes, 0, duration_s, has_ended=True):
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


class _Reader:
    """Reads one of a child's pipes into a capture, until its last writer closes it."""

    def __init__(self, file: Any, limit: int) -> None:
        self.capture = BoundedCapture(limit)
        self.closed = asyncio.Event()
        self._file = file
        self._loop = asyncio.get_running_loop()
        os.set_blocking(file.fileno(), False)
        self._loop.add_reader(file.fileno(), self._read)

    def close(self) -> None:
        """Stop reading; a writer that goes on gets SIGPIPE."""
        if not self._file.closed:
            self._loop.remove_reader(self._file.fileno())
            self._file.close()
            self.closed.set()

    def _read(self) -> None:
        data = self._file.read(_CHUNK)
        if data is None:  # another callback has emptied the pipe
            return
        self.capture.add(data)
        if not data or self.capture.is_flooded:
            self.close()


class _Writer:
    """Writes a child's input into its pipe and closes it."""

    def __init__(self, file: Any, data: bytes) -> None:
        self._file = file
        self._pending = memoryview(data)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(file.fileno(), False)
        self._loop.add_writer(file.fileno(), self._write)

    def close(self) -> None:
        """Stop writing."""
        if not self._file.closed:
            self._loop.remove_writer(self._file.fileno())
            self._file.close()

    def _write(self) -> None:
        try:
            written = self._file.write(self._pending[:_CHUNK])
        except BrokenPipeError:  # a command need not read its input
            written = len(self._pending)
        self._pending = self._pending[written or 0 :]
        if not self._pending:
            self.close()


class _Child:
    """A running child with its pipes on the current event loop."""

    def __init__(self, spec: ChildSpec, output_bytes: int, stdin: bytes | None) -> None:
        self._kill = spec.kill
        self._has_exited = False
        self._process, status = _start(spec, has_stdin=stdin is not None)
        self._stdout = _Reader(self._process.stdout, output_bytes)
        self._stderr = _Reader(self._process.stderr, output_bytes)
        self._status = _Reader(status, _STATUS_BYTES) if status else None
        self._stdin = None if stdin is None else _Writer(self._process.stdin, stdin)

    @property
    def pid(self) -> int:
        """The child's process id, which no other process can get before `end`."""
        return self._process.pid

    async def wait_exited(self, timeout_s: float) -> bool:
        """Wait until the child itself has exited; returns whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_exit(self._process.pid)
            self._has_exited = True
        except TimeoutError:
            pass
        return self._has_exited

    def memory(self) -> int:
        """Return the bytes that the child and what it started hold together."""
        return tree_memory(self._process.pid)

    async def end(self) -> None:
        """Kill what is left, reap the child, and close the pipes."""
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
        """Return the outcome, once `end` is through."""
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
    """Start the child; returns it, and the status pipe's end that is read."""
    status, status_fd, argv = None, -1, spec.argv
    try:
        if spec.has_status:
            status, status_fd = _status_pipe()
            argv = [word.replace("{status_fd}", str(status_fd)) for word in argv]
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


def _status_pipe() -> tuple[BinaryIO, int]:
    """Return a pipe's end to read, and one to write whose number no script uses."""
    read_fd, write_fd = os.pipe()
    try:
        moved = fcntl.fcntl(write_fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_STATUS_FD)
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return open(read_fd, "rb", buffering=0), moved


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
