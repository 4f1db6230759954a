"""A local sandbox's writable directory, its private temporary one, and as root its user.

Made by the local sandboxes. Closing it, or a failure while it is made, restores the directory's
owner and removes temporary directories. Must not run a command.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

from workers.sandbox.base import SandboxFailure
from workers.sandbox.confined_folder import ConfinedFolder
from workers.sandbox.sandbox_user import FolderOwnership, SandboxUser

_PREFIX = "rollout-sandbox-"
_LEFTOVER_AGE_S = 600.0
#: A sandbox may work in a directory inside these, never in the whole of one.
_KEPT_FOLDERS = ("/dev/shm", "/home", "/opt", "/srv", "/tmp", "/usr/src", "/var/tmp")
#: Neither in the whole of these nor in a part, those above excepted.
_SYSTEM_FOLDERS = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys",
    "/usr",
)  # fmt: skip


class Workspace:
    """A root directory, a scratch directory, and as root a user who owns both until `close`.

    `base` holds the scratch directory, and files that commands read but do not write.

    Args:
        root: The directory to work in, which must exist; None makes one that is removed on close.
        file_bytes: Largest file read or written through `files`.

    Raises:
        SandboxFailure: The directory is not there or its owner cannot be changed.
    """

    def __init__(self, root: str | os.PathLike[str] | None, file_bytes: int) -> None:
        self._cleanup = contextlib.ExitStack()
        sweep_leftovers()
        try:
            self.root = self._make_folder("root") if root is None else check_root(root)
            self.base = self._make_folder("base")
            # The sandbox's user may pass through it, but neither list nor write it.
            self.base.chmod(0o711)
            self.scratch = self.base / "tmp"
            self.scratch.mkdir(0o700)
            self.files = ConfinedFolder(self.root, file_bytes)
            self.user = SandboxUser() if os.geteuid() == 0 else None
            if self.user:
                self._hand_over(self.user, is_given=root is not None)
        except BaseException as error:
            self._cleanup.close()
            if isinstance(error, OSError):
                raise SandboxFailure(f"The sandbox would not start: {error}") from error
            raise

    def close(self) -> None:
        """Restore the root's owner, remove temporary directories; all processes must have ended."""
        self._cleanup.close()

    def _make_folder(self, purpose: str) -> Path:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=temporary_place())
        self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        lock = _lock_folder(folder)
        self._cleanup.callback(os.close, lock)
        return Path(folder).resolve()

    def _hand_over(self, user: SandboxUser, *, is_given: bool) -> None:
        self._cleanup.callback(user.close)
        if is_given:
            self._cleanup.callback(os.close, self._claim_root())
        for folder in (self.scratch, self.root):
            ownership = FolderOwnership(folder, user.uid)
            # Registered first, so that the owner is restored also after a failure in the middle.
            self._cleanup.callback(ownership.take_back)
            ownership.hand_over()

    def _claim_root(self) -> int:
        try:
            return _lock_folder(self.root)
        except BlockingIOError:
            raise SandboxFailure(
                f"The sandbox would not start: another one works in {self.root}, and as root each "
                "makes a user of its own the owner. Share one sandbox, or use a copy."
            ) from None


def temporary_place() -> str:
    """Return the parent of temporary directories, which is not /tmp if that can be avoided.

    A directory below /tmp would have to be mounted inside the sandbox's private /tmp, in which a
    command may have put links.
    """
    chosen = tempfile.gettempdir()
    is_tmp = Path(chosen).resolve() == Path("/tmp").resolve()
    return "/var/tmp" if is_tmp and os.access("/var/tmp", os.W_OK | os.X_OK) else chosen


@functools.cache
def sweep_leftovers() -> None:
    """Remove the temporary directories of processes that were killed; once in a process's life."""
    for folder in Path(temporary_place()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):
            # The process that makes a young one may not have locked it yet.
            if time.time() - folder.stat().st_mtime < _LEFTOVER_AGE_S:
                continue
            lock = _lock_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def check_root(root: str | os.PathLike[str]) -> Path:
    """Return the resolved directory, unless it is one of the system or a whole home.

    Raises:
        SandboxFailure: The directory must not be written by untrusted commands.
        OSError: The directory is not there.
    """
    path = Path(root).resolve(strict=True)
    kept = [Path(name).resolve() for name in (Path.home(), tempfile.gettempdir(), *_KEPT_FOLDERS)]
    is_system = any(map(path.is_relative_to, _SYSTEM_FOLDERS))
    is_inside_kept = any(map(path.is_relative_to, _KEPT_FOLDERS))
    if (is_system and not is_inside_kept) or any(folder.is_relative_to(path) for folder in kept):
        raise SandboxFailure(
            f"The sandbox would not start: {path} cannot be its writable directory, because it is "
            "a directory of the system, a whole home, or holds one. Choose a directory of its own."
        )
    return path


def _lock_folder(folder: str | os.PathLike[str]) -> int:
    """Lock a directory as in use until the returned descriptor is closed, or the process ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
