"""One child process to its end: bounded output, a wall clock, and a kill that leaves nothing.

Called by the local sandboxes, on any event loop in any thread. Works with file descriptors and
pidfds on the loop, not with asyncio's child watchers, so that it needs no main thread and no
thread of its own for each command. Must not know what the command is, or which sandbox runs it.
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

from workers.sandbox.base import (
    OUT_OF_MEMORY_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    CommandResult,
    SandboxFailure,
)
from workers.sandbox.capture import BoundedCapture
from workers.sandbox.child_pipes import ChildPipes, ExitWatch
from workers.sandbox.process_tree import tree_memory

#: Output beyond this is not read at all: the pipe is closed and the writer gets SIGPIPE.
DRAINED_BYTES = 64 * 1024**2
_CHUNK = 256 * 1024
_SETTLE_S = 5.0
_WATCH_S = 0.25
#: Of commands: the worker's event loop must stay ahead of what it runs.
NICENESS = 5


@dataclass(frozen=True, slots=True)
class FinishedProcess:
    """How a child ended; `returncode` is negative after a signal, as `subprocess` has it."""

    returncode: int
    stdout: str
    stderr: str
    status: str
    timed_out: bool
    out_of_memory: bool
    truncated: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start.

    Args:
        argv: Program and arguments; `{status_fd}` in it is replaced by the status pipe's number.
        env: The whole environment.
        cwd: Working directory of the child itself.
        stdin: Bytes to feed; None is an empty input.
        kill: Ends everything the child started; called with the child's pid while it is not yet
            reaped, after its end as well as at its timeout.
        has_status: Whether the child gets a third pipe to report on.
        user_id: User and group the child becomes; None stays the worker's own.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: bytes | None
    kill: Callable[[int], None]
    has_status: bool = False
    user_id: int | None = None


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def run_child(
    spec: ChildSpec, *, wall_s: float, output_bytes: int, memory_bytes: int
) -> FinishedProcess:
    """Run a child until it ends or its time is over; nothing it started is left behind.

    It is killed as well when its processes together hold more than `memory_bytes`; that is looked
    at now and then, so for a moment they may.

    Raises:
        SandboxFailure: The child would not start.
    """
    started = time.monotonic()
    child = _Child(spec, output_bytes)
    timed_out = out_of_memory = False
    try:
        while not await child.wait_ended(min(_WATCH_S, started + wall_s - time.monotonic())):
            timed_out = time.monotonic() - started >= wall_s
            out_of_memory = not timed_out and child.memory() > memory_bytes
            if timed_out or out_of_memory:
                break
    finally:
        await child.end()
    return child.finished(timed_out, out_of_memory, time.monotonic() - started)


def as_result(finished: FinishedProcess) -> CommandResult:
    """Return a child's end as a command's result."""
    code, stderr = finished.returncode, finished.stderr
    code = code if code >= 0 else 128 - code
    if finished.timed_out:
        code = TIMEOUT_EXIT_CODE
    elif finished.out_of_memory:
        code = OUT_OF_MEMORY_EXIT_CODE
        stderr += "\n[killed: its processes together used too much memory]\n"
    return CommandResult(
        exit_code=code,
        stdout=finished.stdout,
        stderr=stderr,
        timed_out=finished.timed_out,
        truncated=finished.truncated,
        duration_s=finished.duration_s,
    )


class _Child:
    """A running child with its pipes on the current event loop."""

    def __init__(self, spec: ChildSpec, output_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._captures = [BoundedCapture(output_bytes), BoundedCapture(output_bytes)]
        self._status = BoundedCapture(4096)
        self._readers: dict[int, BoundedCapture] = {}
        self._all_closed = asyncio.Event()
        self._overflowed = False
        self._process = self._start()
        self._exit_watch = ExitWatch(self._process, self._loop)

    async def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the child itself has exited; returns whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exit_watch.wait()
        except TimeoutError:
            return False
        return True

    def memory(self) -> int:
        """Return the bytes that the child and what it started hold together."""
        return tree_memory(self._process.pid)

    async def end(self) -> None:
        """Kill what is left, reap the child, and close the pipes."""
        try:
            # Before the reaping: until then the pid, and the group of its name, cannot be reused.
            self._spec.kill(self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._exit_watch.wait()
            # The readers end when the last holder of the pipes is dead, so this also waits for
            # the descendants.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._all_closed.wait()
        finally:
            self._exit_watch.close()
            for fd in list(self._readers):
                self._close_reader(fd)
            self._close_stdin()
            self._process.wait()

    def finished(self, timed_out: bool, out_of_memory: bool, duration_s: float) -> FinishedProcess:
        """Return the outcome, once `end` is through."""
        out, err = self._captures
        return FinishedProcess(
            returncode=self._process.returncode,
            stdout=out.text(),
            stderr=err.text(),
            status=self._status.text(),
            timed_out=timed_out,
            out_of_memory=out_of_memory,
            truncated=bool(out.dropped or err.dropped or self._overflowed),
            duration_s=duration_s,
        )

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        pipes = ChildPipes(has_stdin=spec.stdin is not None, has_status=spec.has_status)
        words = [word.replace("{status_fd}", str(pipes.status[1])) for word in spec.argv]
        try:
            process = subprocess.Popen(
                words if spec.has_status else spec.argv,
                stdin=pipes.stdin[0] if spec.stdin is not None else subprocess.DEVNULL,
                stdout=pipes.stdout[1],
                stderr=pipes.stderr[1],
                env=spec.env,
                cwd=spec.cwd,
                start_new_session=True,
                pass_fds=(pipes.status[1],) if spec.has_status else (),
                user=spec.user_id,
                group=spec.user_id,
                extra_groups=None if spec.user_id is None else (),
            )
        except (OSError, ValueError) as error:
            pipes.close(pipes.ours)
            raise SandboxFailure(f"The sandbox would not start: {error}") from error
        finally:
            pipes.close(pipes.theirs)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        self._attach(pipes)
        return process

    def _attach(self, pipes: ChildPipes) -> None:
        self._add_reader(pipes.stdout[0], self._captures[0])
        self._add_reader(pipes.stderr[0], self._captures[1])
        self._add_reader(pipes.status[0], self._status)
        self._stdin_fd = pipes.stdin[1]
        self._pending = memoryview(self._spec.stdin or b"")
        if self._stdin_fd >= 0:
            os.set_blocking(self._stdin_fd, False)
            self._loop.add_writer(self._stdin_fd, self._feed)

    def _add_reader(self, fd: int, capture: BoundedCapture) -> None:
        if fd < 0:
            return
        os.set_blocking(fd, False)
        self._readers[fd] = capture
        self._loop.add_reader(fd, self._read, fd)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        capture = self._readers[fd]
        if data:
            capture.add(data)
        self._overflowed = self._overflowed or capture.total >= DRAINED_BYTES
        if not data or capture.total >= DRAINED_BYTES:
            self._close_reader(fd)

    def _close_reader(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        del self._readers[fd]
        os.close(fd)
        if not self._readers:
            self._all_closed.set()

    def _feed(self) -> None:
        try:
            written = os.write(self._stdin_fd, self._pending[:_CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # a command need not read its input
            written = len(self._pending)
        self._pending = self._pending[written:]
        if not self._pending:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin_fd >= 0:
            self._loop.remove_writer(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd = -1
