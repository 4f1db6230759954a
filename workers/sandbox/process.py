"""The sandbox without namespaces: process limits, a clean environment, and a kill by user or mark.

Chosen by `kinds`, with a warning, as root where nothing better runs. A hostile program is not
confined: the program reads every file its user may read, and has the network. As root the command
has a user id of its own, so the program can signal neither the worker nor other sandboxes. As an
ordinary user the program can do so. Must not be chosen silently.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from typing import Any

from workers.sandbox import reaper
from workers.sandbox.base import Command, CommandResult, SandboxLimits
from workers.sandbox.child_process import ChildSpec
from workers.sandbox.command_line import clean_environment, limited_command
from workers.sandbox.file_view import python_path
from workers.sandbox.local import LocalSandbox
from workers.sandbox.process_table import count_tasks, kill_group, kill_marked, kill_user

#: An ordinary user's process limit counts everything of that user, the worker's threads included,
#: and more of them may start while a command runs.
_NPROC_SLACK = 256


class ProcessSandbox(LocalSandbox):
    """Runs each command as a process group with limits, in one directory.

    Args:
        root: The working directory; None makes one that is removed on close.
        limits: Limits of a command.
    """

    def __init__(self, root: str | os.PathLike[str] | None, limits: SandboxLimits) -> None:
        super().__init__(root, limits)
        self._user = self.workspace.user
        # One command at a time: the kill at a command's end takes all processes of the user.
        self._one_at_a_time = asyncio.Lock()

    async def run(self, command: Command, **options: Any) -> CommandResult:
        """Run a command as a process group of its own; see `Sandbox.run`."""
        async with self._one_at_a_time:
            return await super().run(command, **options)

    async def close(self) -> None:
        """End remaining processes, restore the directory's owner, remove temporary directories."""
        async with self._one_at_a_time:
            if self._user and not self.closed:
                await asyncio.to_thread(kill_user, self._user.uid)
            await super().close()

    def child_of(self, command: Command, cwd: str, env: Mapping[str, str] | None) -> ChildSpec:
        """Return a shell with the command below it."""
        mark = f"{reaper.mark()}-{secrets.token_hex(8)}"
        processes = self.limits.processes
        if self._user is None:
            processes += count_tasks(os.getuid()) + _NPROC_SLACK
        limited = limited_command(command, self.limits, cwd=cwd, processes=processes)
        environment = clean_environment(
            home=str(self.workspace.scratch),
            search_path=":".join(filter(None, (self.search_path, python_path()))),
            extra=env,
        )
        return ChildSpec(
            # A command that kills its parent hits this outer shell.
            argv=["/bin/sh", "-c", '"$@"; exit $?', "sh", *limited],
            env=environment | {reaper.MARK: mark},
            cwd=self.root,
            kill=lambda pid: self._kill(pid, mark),
            user_id=self._user.uid if self._user else None,
        )

    def _kill(self, pid: int, mark: str) -> None:
        kill_group(pid)
        if self._user:
            kill_user(self._user.uid)
        else:
            kill_marked(f"{reaper.MARK}={mark}")
