"""The interface of every sandbox, its limits and its results.

Used by the tools, by rewards that run code, and by the agents that work in a directory.
`kinds.open_sandbox` chooses and opens an implementation. Must not import `pipeline`: the library
works alone, and the worker maps `SandboxFailure` to its own error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from workers.sandbox.confined_folder import ConfinedFolder

#: A string is run by a shell; a sequence is executed without one.
Command = str | Sequence[str]
#: Exit code of a command that ran out of time, as of `timeout(1)`.
TIMEOUT_EXIT_CODE = 124
#: Exit code of a command whose processes together used too much memory.
OUT_OF_MEMORY_EXIT_CODE = 137
#: Exit code of a command that used up the disk quota, as after SIGXFSZ.
DISK_FULL_EXIT_CODE = 153


class SandboxFailure(RuntimeError):
    """The sandbox did not start, or it died; the command inside is not the cause."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of each command; only `disk_bytes` is a limit of all commands together.

    Args:
        wall_s: Longest wall-clock time of a command, and its default.
        cpu_s: CPU seconds of each process.
        memory_bytes: Address space of each process, and memory of all of them together.
        processes: Processes and threads at one time.
        output_bytes: Bytes kept of each of stdout and stderr; head and tail survive a cut.
        file_bytes: Largest file a process may write, and the largest one read back.
        disk_bytes: Bytes that commands may add to the sandbox's folders.
    """

    wall_s: float = 60.0
    cpu_s: float = 60.0
    memory_bytes: int = 2 * 1024**3
    processes: int = 128
    output_bytes: int = 256 * 1024
    file_bytes: int = 256 * 1024**2
    disk_bytes: int = 1024**3

    def __post_init__(self) -> None:
        """Reject limits under which no command could run."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"sandbox limit {name} must be positive, not {value}")

    def bound_wall_s(self, timeout_s: float | None) -> float:
        """Return the wall clock of a command that asked for `timeout_s`."""
        return self.wall_s if timeout_s is None else max(0.001, min(timeout_s, self.wall_s))


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command; `exit_code` is 128 + n after signal n, and 124 after a timeout."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether the command exited with 0 in time."""
        return self.exit_code == 0 and not self.timed_out


class Sandbox(ABC):
    """A confined environment in which untrusted commands run on a directory of their own.

    `root` is the directory to which commands and files are relative, as the commands see it.
    `local_files` is the root as a directory of this machine; None if the root is elsewhere.
    `search_path` is a folder that comes first in the PATH of all commands; empty for none.
    """

    root: str
    local_files: ConfinedFolder | None = None
    search_path: str = ""

    @abstractmethod
    async def run(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command to its end or its timeout; none of its processes outlives the call.

        Raises:
            SandboxFailure: The sandbox did not start, or died under the command.
        """

    @abstractmethod
    async def read_file(self, path: str) -> bytes:
        """Return a file's content.

        Raises:
            OSError: As `open` would: missing, a directory, outside the root, too large.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file whole, making the directories above it.

        Raises:
            OSError: As `open` would.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all commands and free all resources; closing twice is harmless."""

    async def __aenter__(self) -> Self:
        """Return the sandbox itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the sandbox."""
        await self.close()
