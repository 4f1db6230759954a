"""What the sandboxes on this machine share: a workspace, its files, and a command run as a child.

Inherited by the bubblewrap, namespaces and process sandboxes; each says which child to start for
a command. Must not start a command in any other way than its subclass says.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence

from workers.sandbox import reaper
from workers.sandbox.base import (
    ClosingSandbox,
    Command,
    CommandResult,
    SandboxFailure,
    SandboxLimits,
)
from workers.sandbox.child_process import (
    ChildSpec,
    FinishedProcess,
    as_result,
    kill_group,
    run_child,
)
from workers.sandbox.command_line import clean_environment, limited_command
from workers.sandbox.file_view import FileView, make_file_view, python_path
from workers.sandbox.workspace import Workspace

#: Longest wait for the first, trivial command of a kind of sandbox.
_PROBE_S = 20.0


class LocalSandbox(ClosingSandbox):
    """Runs each command as a child process on one writable directory.

    Args:
        root: The writable directory, seen inside under the same path; None makes one that is
            removed on close.
        limits: What a command may use.

    Raises:
        SandboxFailure: The directory is not there or cannot be used.
    """

    def __init__(self, root: str | os.PathLike[str] | None, limits: SandboxLimits) -> None:
        self.limits = limits
        self.workspace = Workspace(root, limits.file_bytes)
        self.local_files = self.workspace.files
        self.closed = False

    @property
    def root(self) -> str:
        """The writable directory; the same path inside and outside."""
        return str(self.workspace.root)

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
        finished = await run_child(
            self.child_of(command, cwd, stdin, env),
            wall_s=self.limits.bound_wall_s(timeout_s),
            output_bytes=self.limits.output_bytes,
            memory_bytes=self.limits.memory_bytes,
        )
        self.check_end(finished)
        return as_result(finished)

    def child_of(
        self,
        command: Command,
        cwd: str | None,
        stdin: bytes | None,
        env: Mapping[str, str] | None,
    ) -> ChildSpec:
        """Return the process to start for a command."""
        raise NotImplementedError

    def check_end(self, finished: FinishedProcess) -> None:
        """Raise `SandboxFailure` if the sandbox itself failed, and not the command."""

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file under the root."""
        return await asyncio.to_thread(self.workspace.files.read, path)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file under the root, making the directories above it."""
        await asyncio.to_thread(self.workspace.files.write, path, data, make_folders=True)

    async def close(self) -> None:
        """Give the directory back and remove what was temporary."""
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
        limits: What a command may use.
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

    def namespaces(self, view: FileView) -> list[str]:
        """Return the words that make the namespaces; a command follows them.

        The program reports the command's end as `"exit-code"` on the status pipe.
        """
        raise NotImplementedError

    def child_of(
        self,
        command: Command,
        cwd: str | None,
        stdin: bytes | None,
        env: Mapping[str, str] | None,
    ) -> ChildSpec:
        """Return the program that makes the namespaces, with the command inside."""
        inner = limited_command(command, self.limits, cwd=os.path.join(self.root, cwd or "."))
        clean = clean_environment(home="/tmp", search_path=python_path(), extra=env)
        return ChildSpec(
            argv=[*self.prefix, *inner],
            # The mark is for the reaper alone: the program takes it out of the command's own.
            env=clean | {reaper.MARK: reaper.mark()},
            cwd="/",
            stdin=stdin,
            kill=kill_group,
            has_status=True,
        )

    def check_end(self, finished: FinishedProcess) -> None:
        """Raise `SandboxFailure` unless the command's end was reported.

        An end without a report is a failure of the program that made the namespaces, or somebody
        killed it; a timeout is neither.
        """
        was_killed = finished.timed_out or finished.out_of_memory
        if not was_killed and '"exit-code"' not in finished.status:
            program = os.path.basename(self.prefix[0])
            reason = finished.stderr.strip()[-500:] or f"{program} ended with {finished.returncode}"
            raise SandboxFailure(f"The sandbox would not start or died: {reason}")


def find_obstacle(open_in: Callable[[str], LocalSandbox]) -> str:
    """Run `true` in a sandbox once and return why that does not work here; empty if it does.

    Args:
        open_in: Opens the sandbox on a directory.
    """
    with tempfile.TemporaryDirectory(prefix="rollout-sandbox-probe-") as folder:
        try:
            sandbox = open_in(folder)
        except SandboxFailure as error:
            return str(error)
        try:
            child = sandbox.child_of(["true"], None, None, None)
            ended = subprocess.run(
                [word.replace("{status_fd}", "2") for word in child.argv],
                env=child.env,
                cwd=child.cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired, SandboxFailure) as error:
            return str(error)
        finally:
            sandbox.workspace.close()
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with {ended.returncode}"
