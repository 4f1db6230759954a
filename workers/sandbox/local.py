"""The sandboxes on this machine: a workspace, its files, and each command run as a child process.

Inherited by the kinds bubblewrap, namespaces and process, each of which names the child to start
for a command. Must not start a command in any other way.
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from workers.sandbox import reaper
from workers.sandbox.base import Command, CommandResult, Sandbox, SandboxFailure, SandboxLimits
from workers.sandbox.child_process import ChildSpec, FinishedChild, run_child
from workers.sandbox.command_line import clean_environment, limited_command
from workers.sandbox.disk_quota import DiskQuota
from workers.sandbox.file_view import FileView, make_file_view, python_path
from workers.sandbox.process_table import kill_group
from workers.sandbox.workspace import Workspace


class LocalSandbox(Sandbox):
    """Runs each command as a child process on one writable directory.

    Args:
        root: The writable directory, seen inside under the same path; None makes one that is
            removed on close.
        limits: Limits of a command.

    Raises:
        SandboxFailure: The directory is not there or cannot be used.
    """

    def __init__(self, root: str | os.PathLike[str] | None, limits: SandboxLimits) -> None:
        self.limits = limits
        self.workspace = Workspace(root, limits.file_bytes)
        self.root = str(self.workspace.root)
        self.local_files = self.workspace.files
        self.quota = DiskQuota(
            (self.workspace.root, self.workspace.scratch),
            limits.disk_bytes,
            was_given=root is not None,
        )
        self.closed = False

    async def run(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command to its end; see `Sandbox.run`."""
        if self.closed:
            raise SandboxFailure("The sandbox is closed.")
        child = self.child_of(command, cwd or ".", env)
        finished = await run_child(
            child, self.limits, stdin=stdin, timeout_s=timeout_s, quota=self.quota
        )
        self.check_end(finished)
        return finished.result

    @abstractmethod
    def child_of(self, command: Command, cwd: str, env: Mapping[str, str] | None) -> ChildSpec:
        """Return the process to start for a command."""

    def check_end(self, finished: FinishedChild) -> None:
        """Raise `SandboxFailure` if the sandbox itself failed, and not the command."""

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file under the root."""
        return await asyncio.to_thread(self.workspace.files.read, path)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file under the root, making the directories above it."""
        await asyncio.to_thread(self.workspace.files.write, path, data, make_folders=True)

    async def close(self) -> None:
        """Restore the directory's owner and remove temporary directories."""
        if self.closed:
            return
        self.closed = True
        await asyncio.to_thread(self.workspace.close)


class ConfinedSandbox(LocalSandbox):
    """Runs each command in fresh namespaces around one writable directory.

    /tmp is private to the sandbox and lasts as long as it; where a directory of the interpreter or
    the root itself lies below /tmp, it is fresh for each command instead.

    Args:
        root: The writable directory, seen inside under the same path; None makes one that is
            removed on close.
        limits: Limits of a command.
        readable: Further paths that commands may read.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None, limits: SandboxLimits, readable: Sequence[str]
    ) -> None:
        super().__init__(root, limits)
        try:
            self.prefix = self.namespaces(make_file_view(self.workspace, readable))
        except OSError as error:
            self.workspace.close()
            raise SandboxFailure(f"The sandbox would not start: {error}") from error

    @abstractmethod
    def namespaces(self, view: FileView) -> list[str]:
        """Return the arguments that make the namespaces; a command follows them.

        The program reports the command's end as `"exit-code"` on the status pipe.
        """

    def child_of(self, command: Command, cwd: str, env: Mapping[str, str] | None) -> ChildSpec:
        """Return the program that makes the namespaces, with the command inside."""
        inner = limited_command(command, self.limits, cwd=os.path.join(self.root, cwd))
        path = ":".join(filter(None, (self.search_path, python_path())))
        clean = clean_environment(home="/tmp", search_path=path, extra=env)
        return ChildSpec(
            argv=[*self.prefix, *inner],
            # The mark is for the reaper alone: the program takes it out of the command's own.
            env=clean | {reaper.MARK: reaper.mark()},
            cwd="/",
            kill=kill_group,
            has_status=True,
        )

    def check_end(self, finished: FinishedChild) -> None:
        """Raise `SandboxFailure` unless the command's end was reported.

        Without a report, the program that made the namespaces failed or was killed, unless the
        command ran out of time, memory or disk.
        """
        if not finished.was_killed and '"exit-code"' not in finished.status:
            program, result = os.path.basename(self.prefix[0]), finished.result
            reason = result.stderr.strip()[-500:] or f"{program} ended with {result.exit_code}"
            raise SandboxFailure(f"The sandbox would not start or died: {reason}")
