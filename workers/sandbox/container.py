"""The base of the docker and the Kubernetes sandbox: commands, their timeouts, files by commands.

The subclasses execute an argument vector in their container, and remove it. Their clients block, so
they are called in threads of this module. Must not assume more of an image than a POSIX shell and
coreutils or busybox.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import posixpath
import shlex
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workers.sandbox.base import (
    TIMEOUT_EXIT_CODE,
    Command,
    CommandResult,
    Sandbox,
    SandboxFailure,
    SandboxLimits,
)
from workers.sandbox.capture import MOST_READ_BYTES, BoundedCapture

DEFAULT_IMAGE = "python:3.11-slim"
DEFAULT_LIFETIME_S = 4 * 3600.0
#: Labels of every container made here.
OWNER_LABEL = "rollout-sandbox-owner"
EXPIRES_LABEL = "rollout-sandbox-expires"

_SETTLE_S = 30.0
_KILL_AGAIN_S = 1.0
_FILE_ERRORS = {44: errno.ENOENT, 45: errno.EISDIR, 46: errno.EINVAL}
_READ = '[ -e "$1" ] || exit 44; [ -d "$1" ] && exit 45; [ -f "$1" ] || exit 46; head -c "$2" "$1"'
_WRITE = (
    'mkdir -p -- "$(dirname -- "$1")" && [ ! -d "$1" ] || exit 45; head -c "$2" > "$1.$3" '
    '&& mv -f -- "$1.$3" "$1"'
)
#: Kills the processes that the command left: all but process 1 and this shell.
_RUN_ALONE = '"$@"; code=$?; kill -9 -1 2>/dev/null; exit $code'
_KILL_ALL = ("sh", "-c", "kill -9 -1")
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -c "$1"; exec sh -c "$1"'

_log = logging.getLogger(__name__)
_threads = ThreadPoolExecutor(64, thread_name_prefix="sandbox")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Execution:
    """One command in a container, its output so far, and the request to stop it.

    `interrupt` is set by the thread that waits for output, and ends that wait.
    """

    argv: Sequence[str]
    stdin: bytes | None
    stdout: BoundedCapture
    stderr: BoundedCapture
    is_stopped: threading.Event = field(default_factory=threading.Event)
    interrupt: Callable[[], None] = lambda: None

    def stop(self) -> None:
        """Have the thread return without waiting for the command."""
        self.is_stopped.set()
        self.interrupt()

    @property
    def is_flooded(self) -> bool:
        """Whether so much was written that nothing more of it is read."""
        return self.stdout.is_flooded or self.stderr.is_flooded


class ContainerSandbox(Sandbox):
    """A container on which commands are executed one at a time.

    Args:
        root: Directory in the container that commands and files are relative to.
        limits: Limits of a command; memory and processes bound the container as a whole.
    """

    def __init__(self, root: str, limits: SandboxLimits) -> None:
        self.root = root
        self._limits = limits
        self._one_at_a_time = asyncio.Lock()
        self._closed = False

    async def run(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command in the container; see `Sandbox.run`."""
        argv = ["sh", "-c", _SHELL, "sh", command] if isinstance(command, str) else list(command)
        if env:
            argv = ["env", *(f"{name}={value}" for name, value in env.items()), *argv]
        folder = shlex.quote(self._path(cwd or "."))
        # A fixed number of bytes: not every protocol can say where an input ends.
        feed = "" if stdin is None else f"head -c {len(stdin)} | "
        path = shlex.quote(self.search_path)
        steps = [f"PATH={path}:$PATH; export PATH"] if self.search_path else []
        steps += [*_ulimits(self._limits), f"cd -- {folder} || exit 126", feed + _RUN_ALONE]
        script = "; ".join(steps)
        async with self._one_at_a_time:
            return await self._run(["sh", "-c", script, "sh", *argv], stdin, timeout_s)

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file in the container."""
        most = self._limits.file_bytes
        argv = ["sh", "-c", _READ, "sh", self._path(path), str(most + 1)]
        async with self._one_at_a_time:
            execution, code = await self._execute_in_thread(argv, None, most + 1)
        _raise_for_code(code, path, execution)
        if execution.stdout.total > most:
            raise OSError(errno.EFBIG, f"The file is larger than {most} bytes", path)
        return execution.stdout.kept()

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file in the container, making the directories above it."""
        if len(data) > self._limits.file_bytes:
            raise OSError(
                errno.EFBIG, f"The file is larger than {self._limits.file_bytes} bytes", path
            )
        suffix = os.urandom(4).hex()
        argv = ["sh", "-c", _WRITE, "sh", self._path(path), str(len(data)), suffix]
        async with self._one_at_a_time:
            execution, code = await self._execute_in_thread(argv, data, 4096)
        _raise_for_code(code, path, execution)

    async def close(self) -> None:
        """Remove the container; closing twice is harmless.

        A container that cannot be removed is logged, and is no error: the container ends by itself
        and is removed as a leftover. The results of its commands are valid.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await in_thread(self._remove)
        except SandboxFailure as error:
            _log.warning("%s It ends by itself when its lifetime is over.", error)

    @abstractmethod
    def _execute(self, execution: Execution) -> int:
        """Execute an argument vector to its end and return the exit code; called in a thread.

        Fills the captures; returns soon after `stop` is called.

        Raises:
            SandboxFailure: The container ended, or its API does not answer.
        """

    @abstractmethod
    def _remove(self) -> None:
        """Remove the container; a missing container is no error. Called in a thread.

        Raises:
            SandboxFailure: The container could not be removed.
        """

    async def _run(
        self, argv: Sequence[str], stdin: bytes | None, timeout_s: float | None
    ) -> CommandResult:
        begun = time.monotonic()
        execution = self._execution(argv, stdin, self._limits.output_bytes)
        running = asyncio.ensure_future(in_thread(self._execute, execution))
        code, timed_out = TIMEOUT_EXIT_CODE, False
        try:
            async with asyncio.timeout(self._limits.bound_wall_s(timeout_s)):
                code = await asyncio.shield(running)
        except TimeoutError:
            timed_out = True
        finally:
            if not running.done() or execution.is_flooded:
                await self._end(execution, running)
        return CommandResult(
            exit_code=code,
            stdout=execution.stdout.text(),
            stderr=execution.stderr.text(),
            timed_out=timed_out,
            truncated=execution.stdout.is_truncated or execution.stderr.is_truncated,
            duration_s=time.monotonic() - begun,
        )

    async def _end(self, execution: Execution, running: asyncio.Future[int]) -> None:
        """Kill everything in the container but its first process, until the command has ended."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                ended: set[asyncio.Future[int]] = set()
                while not ended:  # the first kill misses a command that is only about to start
                    await in_thread(self._execute, self._execution(_KILL_ALL, None, 64))
                    ended, _ = await asyncio.wait([running], timeout=_KILL_AGAIN_S)
        except TimeoutError:
            raise SandboxFailure("The sandbox does not answer any more.") from None
        finally:
            # An earlier stop would end the thread while the command goes on.
            execution.stop()
        if running.done() and not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not log it

    async def _execute_in_thread(
        self, argv: Sequence[str], stdin: bytes | None, output_bytes: int
    ) -> tuple[Execution, int]:
        execution = self._execution(argv, stdin, output_bytes)
        try:
            async with asyncio.timeout(self._limits.wall_s):
                return execution, await in_thread(self._execute, execution)
        except TimeoutError:
            raise SandboxFailure("The sandbox does not answer: a file took too long.") from None
        finally:
            execution.stop()

    def _execution(self, argv: Sequence[str], stdin: bytes | None, output_bytes: int) -> Execution:
        if self._closed:
            raise SandboxFailure("The sandbox is closed.")
        return Execution(argv, stdin, BoundedCapture(output_bytes), BoundedCapture(output_bytes))

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.root, path))


async def in_thread(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Call a blocking client's function in a thread of this module."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)


def owner_labels(lifetime_s: float) -> dict[str, str]:
    """Return the labels of a new container: the process that made it, and when it expires."""
    expires = str(math.ceil(time.time() + lifetime_s))
    return {OWNER_LABEL: f"{_host_and_namespace()}-{os.getpid()}", EXPIRES_LABEL: expires}


def is_leftover(labels: Mapping[str, str]) -> bool:
    """Say whether a container has expired, or the process that made it is dead."""
    expires, owner = labels.get(EXPIRES_LABEL, ""), labels.get(OWNER_LABEL, "")
    if expires.isdigit() and int(expires) < time.time():
        return True
    host, _, pid = owner.rpartition("-")
    if host != _host_and_namespace() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _host_and_namespace() -> str:
    """Return a name for the host and the PID namespace, in which a process id is unique."""
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = "0"
    return f"{socket.gethostname()[:40].strip('-._')}-{namespace}"


def _ulimits(limits: SandboxLimits) -> list[str]:
    # The container bounds memory and processes; file sizes are in blocks of 512 for every sh.
    values = {"c": 0, "t": math.ceil(limits.cpu_s), "f": max(1, limits.file_bytes // 512)}
    return [f"ulimit -{flag} {value} 2>/dev/null" for flag, value in values.items()]


def _raise_for_code(code: int, path: str, execution: Execution) -> None:
    if code == 0:
        return
    if execution.is_flooded:
        raise OSError(errno.EFBIG, f"More than {MOST_READ_BYTES} bytes are not read", path)
    number = _FILE_ERRORS.get(code, errno.EIO)
    message = execution.stderr.text().strip()
    if code in _FILE_ERRORS or not message:
        message = os.strerror(number)
    raise OSError(number, message, path)
