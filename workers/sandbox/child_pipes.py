"""The two things that tie a child process to an event loop: its pipes, and news of its exit.

Used by `child_process`. Must not reap the child: until it is reaped, its id cannot be reused.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from collections.abc import Sequence

from workers.sandbox.base import SandboxFailure

#: Scripts use single digits.
_FIRST_FREE_FD = 10


class ChildPipes:
    """The pipes between us and a child, as (read end, write end); -1 is a pipe that is not."""

    def __init__(self, *, has_stdin: bool, has_status: bool) -> None:
        made: list[tuple[int, int]] = []
        try:
            for wanted in (has_stdin, True, True, has_status):
                made.append(os.pipe() if wanted else (-1, -1))
            if has_status:
                made[-1] = (made[-1][0], _move_up(made[-1][1]))
        except OSError as error:
            self.close([fd for pair in made for fd in pair])
            raise SandboxFailure(f"The sandbox would not start: {error}") from error
        self.stdin, self.stdout, self.stderr, self.status = made
        self.ours = [self.stdin[1], self.stdout[0], self.stderr[0], self.status[0]]
        self.theirs = [self.stdin[0], self.stdout[1], self.stderr[1], self.status[1]]

    @staticmethod
    def close(fds: Sequence[int]) -> None:
        """Close these ends."""
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _move_up(fd: int) -> int:
    """Move a descriptor to a number that no script uses for a purpose of its own."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
    os.close(fd)
    return moved


class ExitWatch:
    """Waits for a child's exit without reaping it."""

    def __init__(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop
        self._exited = asyncio.Event()
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
            self._poll = loop.create_task(self._poll_exit())
        else:
            loop.add_reader(self._pidfd, self._note_exit)

    async def wait(self) -> None:
        """Wait for the exit; the process stays a zombie until somebody reaps it."""
        await self._exited.wait()

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._exited.set()

    async def _poll_exit(self) -> None:
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            await asyncio.sleep(0.01)
        self._exited.set()
