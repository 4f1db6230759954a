"""Files under one directory and no others, for any path and against any other process.

Used by the local sandboxes, the file editor and the search tool. Every path is walked one name at a
time from an open directory. The kernel never follows a symbolic link, so no `..`, absolute path,
link, or link made meanwhile leads outside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MAX_LINKS = 40
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OutsideRoot(PermissionError):
    """A path leads out of the directory it is confined to."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EACCES, "The path leads outside the allowed directory", path)


@dataclass(frozen=True, slots=True)
class _Location:
    """An open directory and a name in it that is no symbolic link; '.' is the directory itself."""

    folder_fd: int
    name: str


class ConfinedFolder:
    """Reads and writes files beneath `root`.

    Args:
        root: The directory; relative paths start there, absolute ones must lie in it.
        file_bytes: Largest file that is read or written.
    """

    def __init__(self, root: str | os.PathLike[str], file_bytes: int = 16 * 1024**2) -> None:
        self.root = Path(root).resolve(strict=True)
        if not self.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(root))
        self._file_bytes = file_bytes

    def read(self, path: str) -> bytes:
        """Return the content of a regular file.

        Raises:
            OutsideRoot: The path leads out of the root.
            OSError: As `open` would, or the file is too large or no regular file.
        """
        with self.open_file(path) as fd, open(fd, "rb", closefd=False) as file:
            data = file.read(self._file_bytes + 1)
        if len(data) > self._file_bytes:
            raise OSError(errno.EFBIG, f"The file is larger than {self._file_bytes} bytes", path)
        return data

    @contextlib.contextmanager
    def open_file(self, path: str) -> Iterator[int]:
        """Open a regular file for reading; yields its descriptor and closes it."""
        with self._locate(path) as location:
            # Without O_NONBLOCK a named pipe in the tree would block for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(location.name, flags, dir_fd=location.folder_fd)
        try:
            self._check_regular(fd, path)
            yield fd
        finally:
            os.close(fd)

    def write(self, path: str, data: bytes, *, make_folders: bool = False) -> None:
        """Write a file as a whole; readers see the old content or the new content.

        The new file has the old one's mode and owner, or its directory's owner.

        Raises:
            OutsideRoot: The path leads out of the root.
            OSError: As `open` would, or the path names no regular file.
        """
        if len(data) > self._file_bytes:
            raise OSError(errno.EFBIG, f"The file is larger than {self._file_bytes} bytes", path)
        with self._locate(path, make_folders=make_folders) as location:
            old = _stat_or_none(location)
            if old is not None and not stat.S_ISREG(old.st_mode):
                raise OSError(errno.EISDIR, "Not a regular file", path)
            self._replace(location, data, old)

    def remove(self, path: str) -> None:
        """Remove a file."""
        with self._locate(path) as location:
            os.unlink(location.name, dir_fd=location.folder_fd)

    def stat(self, path: str) -> os.stat_result:
        """Return the status of the file or directory at a path, its links followed."""
        with self._locate(path) as location:
            return os.stat(location.name, dir_fd=location.folder_fd, follow_symlinks=False)

    def open_folder(self, path: str) -> int:
        """Return a descriptor of a directory; the caller closes it."""
        with self._locate(path) as location:
            return os.open(location.name, _FOLDER_FLAGS, dir_fd=location.folder_fd)

    def _check_regular(self, fd: int, path: str) -> None:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", path)

    def _replace(self, location: _Location, data: bytes, old: os.stat_result | None) -> None:
        temporary = f".{location.name[:200]}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o644, dir_fd=location.folder_fd)
        try:
            with open(fd, "wb") as file:
                _set_mode_and_owner(fd, old, os.fstat(location.folder_fd))
                file.write(data)
            os.rename(
                temporary,
                location.name,
                src_dir_fd=location.folder_fd,
                dst_dir_fd=location.folder_fd,
            )
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=location.folder_fd)
            raise

    @contextlib.contextmanager
    def _locate(self, path: str, *, make_folders: bool = False) -> Iterator[_Location]:
        """Walk to a path; yields the directory it is in and its last name."""
        with _Walk(self.root, path, make_folders) as walk:
            name = walk.finish()
            yield _Location(walk.here, name)


class _Walk:
    """The stack of open directories from the root to the current position in a path."""

    def __init__(self, root: Path, path: str, make_folders: bool) -> None:
        self._root = root
        self._path = path
        self._make_folders = make_folders
        self._links_left = _MAX_LINKS
        self._names = self._split(path)
        self._stack = [os.open(root, _FOLDER_FLAGS)]

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._stack:
            os.close(fd)

    @property
    def here(self) -> int:
        """The directory reached."""
        return self._stack[-1]

    def finish(self) -> str:
        """Walk all names; return the last, once it is certain to be no symbolic link."""
        while self._names:
            name = self._names.pop()
            if name == "..":
                self._step_up()
            elif (target := self._link_target(name)) is not None:
                self._follow(target)
            elif self._names:
                self._step_down(name)
            else:
                return name
        return "."

    def _split(self, path: str) -> list[str]:
        """Return the names of a path, last first; an absolute one restarts at the root."""
        if "\0" in path:
            raise OSError(errno.EINVAL, "The path holds a NUL byte", path)
        names = PurePosixPath(path)
        if names.is_absolute():
            if not names.is_relative_to(self._root):
                raise OutsideRoot(self._path)
            names = names.relative_to(self._root)
        return [name for name in reversed(names.parts) if name != "."]

    def _step_up(self) -> None:
        if len(self._stack) == 1:
            raise OutsideRoot(self._path)
        os.close(self._stack.pop())

    def _step_down(self, name: str) -> None:
        try:
            fd = os.open(name, _FOLDER_FLAGS, dir_fd=self.here)
        except FileNotFoundError:
            if not self._make_folders:
                raise FileNotFoundError(errno.ENOENT, "No such directory", self._path) from None
            os.mkdir(name, 0o755, dir_fd=self.here)
            fd = os.open(name, _FOLDER_FLAGS, dir_fd=self.here)
            _set_mode_and_owner(fd, None, os.fstat(self.here))
        self._stack.append(fd)

    def _link_target(self, name: str) -> str | None:
        try:
            return os.readlink(name, dir_fd=self.here)
        except OSError:  # no link, or not there, which opening it reports
            return None

    def _follow(self, target: str) -> None:
        self._links_left -= 1
        if not self._links_left:
            raise OSError(errno.ELOOP, "Too many symbolic links", self._path)
        self._names += self._split(target)
        if target.startswith("/"):
            while len(self._stack) > 1:
                os.close(self._stack.pop())


def _stat_or_none(location: _Location) -> os.stat_result | None:
    try:
        return os.stat(location.name, dir_fd=location.folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _set_mode_and_owner(fd: int, old: os.stat_result | None, folder: os.stat_result) -> None:
    """Give a new file the mode and owner of the one it replaces, or its directory's owner."""
    if os.geteuid() == 0:
        owner = old or folder
        os.fchown(fd, owner.st_uid, owner.st_gid)
    if old is not None:
        os.fchmod(fd, stat.S_IMODE(old.st_mode))
