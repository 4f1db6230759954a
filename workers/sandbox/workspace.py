"""What a local sandbox stands on: its directory, a private temporary one, and a user to run as.

Made by the local sandboxes; given back whole on close, also when making it failed half-way.
Must not run anything.
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
from workers.sandbox.sandbox_user import SandboxUser, SandboxUsersFolder

_PREFIX = "rollout-sandbox-"
_LEFTOVER_AGE_S = 600.0
#: A sandbox may work in a directory inside these, never in the whole of one.
_KEPT_FOLDERS = ("/home", "/opt", "/srv", "/tmp", "/usr/src", "/var/tmp")
#: Neither in the whole of these nor in a part.
_SYSTEM_FOLDERS = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys",
    "/usr",
)  # fmt: skip


class Workspace:
    """A root directory, a scratch directory, and as root a user who owns both for the time being.

    `base` holds the scratch directory and what is prepared for the sandbox but not written in it.

    Args:
        root: The directory to work in, which must exist; None makes one that is removed on close.
        file_bytes: Largest file read or written through `files`.

    Raises:
        SandboxFailure: The directory is not there or cannot be lent.
    """

    def __init__(self, root: str | os.PathLike[str] | None, file_bytes: int) -> None:
        self._cleanup = contextlib.ExitStack()
        sweep_leftovers()
        try:
            self.root = self._make_folder("root") if root is None else check_root(root)
            self.base = self._make_folder("base")
            # Passed through by the sandbox's user, but not listed or written.
            self.base.chmod(0o711)
            self.scratch = self.base / "tmp"
            self.scratch.mkdir(0o700)
            self.files = ConfinedFolder(self.root, file_bytes)
            self.user = SandboxUser() if os.geteuid() == 0 else None
            if self.user:
                self._lend(self.user, is_given=root is not None)
        except OSError as error:
            self._cleanup.close()
            raise SandboxFailure(f"The sandbox would not start: {error}") from error
        except BaseException:
            self._cleanup.close()
            raise

    def close(self) -> None:
        """Give the root back and remove what was temporary; every process must have ended."""
        self._cleanup.close()

    def _make_folder(self, purpose: str) -> Path:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=temporary_place())
        self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        lock = _lock_folder(folder)
        self._cleanup.callback(os.close, lock)
        return Path(folder).resolve()

    def _lend(self, user: SandboxUser, *, is_given: bool) -> None:
        self._cleanup.callback(user.close)
        if is_given:
            self._cleanup.callback(os.close, self._claim_root())
        for folder in (self.scratch, self.root):
            lent = SandboxUsersFolder(folder, user.uid)
            # Registered first, so that a tree lent in part is taken back too.
            self._cleanup.callback(lent.take_back)
            lent.lend()

    def _claim_root(self) -> int:
        try:
            return _lock_folder(self.root)
        except BlockingIOError:
            raise SandboxFailure(
                f"The sandbox would not start: another one works in {self.root}, and as root each "
                "gives the directory to a user of its own. Share one sandbox, or use a copy."
            ) from None


def temporary_place() -> str:
    """Return where temporary directories are made.

    Not in /tmp if that can be avoided: a directory below it would have to be mounted inside the
    sandbox's private /tmp, in which a command may have put links.
    """
    chosen = tempfile.gettempdir()
    is_tmp = Path(chosen).resolve() == Path("/tmp").resolve()
    return "/var/tmp" if is_tmp and os.access("/var/tmp", os.W_OK | os.X_OK) else chosen


@functools.cache
def sweep_leftovers() -> None:
    """Remove the temporary directories of processes that were killed; once in a process's life."""
    for folder in Path(temporary_place()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):
            # Too young: its maker may not have locked it yet.
            if time.time() - folder.stat().st_mtime < _LEFTOVER_AGE_S:
                continue
            lock = _lock_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def check_root(root: str | os.PathLike[str]) -> Path:
    """Return the resolved directory, unless it is the system's or somebody's whole home.

    Raises:
        SandboxFailure: It must not be given to untrusted commands.
        OSError: It is not there.
    """
    path = Path(root).resolve(strict=True)
    kept = [Path(name).resolve() for name in (Path.home(), tempfile.gettempdir(), *_KEPT_FOLDERS)]
    inside = [folder for folder in _SYSTEM_FOLDERS if path.is_relative_to(folder)]
    is_system = bool(inside) and not path.is_relative_to("/usr/src")
    if is_system or any(folder.is_relative_to(path) for folder in kept):
        raise SandboxFailure(
            f"The sandbox would not start: {path} cannot be its writable directory, because it is "
            "a directory of the system, a whole home, or holds one. Choose a directory of its own."
        )
    return path


def _lock_folder(folder: str | os.PathLike[str]) -> int:
    """Hold a directory as in use, as long as the descriptor is open; the kernel ends it with us."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
