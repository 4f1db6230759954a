"""The fallback sandbox: process limits, a clean environment, and a thorough kill, no namespaces.

Chosen by `kinds` where bubblewrap does not run, with one warning. It bounds mistakes; it does
not confine a hostile program: that one still reads what the user it runs as may read, and has the
network. As root the command runs as an unprivileged user of its own, so it can signal neither the
worker nor other sandboxes; as an ordinary user it can. Must not be chosen silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.sandbox import reaper
from workers.sandbox.base import Command, CommandResult, SandboxLimits
from workers.sandbox.child_process import ChildSpec, kill_group
from workers.sandbox.command_line import clean_environment, limited_command
from workers.sandbox.local import LocalSandbox
from workers.sandbox.sandbox_user import is_running, process_ids

#: An ordinary user's process limit counts everything of that user, the worker's threads included,
#: and more of them may start while a command runs.
_NPROC_SLACK = 256


class ProcessSandbox(LocalSandbox):
    """Runs each command as a process group with limits, in one directory.

    Args:
        root: The working directory; None makes one that is removed on close.
        limits: What a command may use.
    """

    def __init__(self, root: str | os.PathLike[str] | None, limits: SandboxLimits) -> None:
        super().__init__(root, limits)
        self._user = self.workspace.user
        # One command at a time: the kill at a command's end finds its processes by their user.
        self._turn = asyncio.Lock()

    async def run(self, command: Command, **options: Any) -> CommandResult:
        """Run a command as a process group of its own; see `Sandbox.run`."""
        async with self._turn:
            return await super().run(command, **options)

    async def close(self) -> None:
        """End what still runs, give the directory back and remove what was temporary."""
        async with self._turn:
            if self._user and not self.closed:
                await asyncio.to_thread(self._user.kill_all)
            await super().close()

    def child_of(
        self,
        command: Command,
        cwd: str | None,
        stdin: bytes | None,
        env: Mapping[str, str] | None,
    ) -> ChildSpec:
        """Return a shell with the command below it."""
        mark = f"{reaper.mark()}-{secrets.token_hex(8)}"
        processes = self.limits.processes
        if self._user is None:
            processes += _count_own_tasks() + _NPROC_SLACK
        limited = limited_command(command, self.limits, cwd=cwd or ".", processes=processes)
        environment = clean_environment(
            home=str(self.workspace.scratch),
            search_path=os.path.join(sys.prefix, "bin"),
            extra=env,
        )
        return ChildSpec(
            # The outer shell is what a command that kills its parent finds there.
            argv=["/bin/sh", "-c", '"$@"; exit $?', "sh", *limited],
            env=environment | {reaper.MARK: mark},
            cwd=self.root,
            stdin=stdin,
            kill=lambda pid: self._kill(pid, mark),
            user_id=self._user.uid if self._user else None,
        )

    def _kill(self, pid: int, mark: str) -> None:
        kill_group(pid)
        if self._user:
            self._user.kill_all()
        else:
            _kill_marked(f"{reaper.MARK}={mark}".encode())


def _kill_marked(mark: bytes) -> None:
    """Kill the processes that inherited this environment, also those in another session."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for _ in range(32):
            marked = [
                pid for pid in process_ids() if _has_mark(pid, mark) and is_running(pid, number)
            ]
            if not marked:
                break
            for pid in marked:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _count_own_tasks() -> int:
    count = 0
    for pid in process_ids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count
