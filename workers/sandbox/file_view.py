"""The part of the file system that a confined command sees.

Prepared here and mounted by the kinds bubblewrap and namespaces: the system's programs and
libraries read-only, an /etc of its own, the running Python, and one writable directory. Must not
mount anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workers.sandbox.workspace import Workspace

#: Folders in memory, new for each command; /tmp is one unless a folder is mounted there.
MEMORY_FOLDERS = ("/tmp", "/dev/shm")
#: Size of each of them.
TMP_BYTES = 256 * 1024**2
#: The only folder of the system's /etc that commands see: links of the package manager.
ETC_MOUNTED = "/etc/alternatives"
_ETC_COPIED = ("ld.so.cache", "localtime")
_SYSTEM_FOLDERS = tuple(map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")))


@dataclass(frozen=True, slots=True)
class FileView:
    """The mounts of a sandbox; each path is mounted under its own name.

    Args:
        system: Folders of the system, read-only.
        links: Links at the top of the file system, by their path.
        etc: The folder to mount as /etc.
        readable: Further paths, read-only.
        tmp: The folder to mount as /tmp; None is a fresh one in memory for each command.
    """

    system: list[str]
    links: dict[str, str]
    etc: Path
    readable: list[str]
    tmp: Path | None


def make_file_view(workspace: Workspace, readable: Sequence[str]) -> FileView:
    """Prepare the view of a workspace's commands.

    Raises:
        OSError: A folder could not be prepared.
    """
    root = str(workspace.root)
    paths = [path for path in [*_python_folders(), *readable] if not is_within(path, root)]
    # No mount point lies below a directory that commands write: a command could put a link there,
    # and the next command's mounts would follow it with the worker's privileges.
    is_below_tmp = any(is_within(path, "/tmp") for path in [*paths, root])
    return FileView(
        system=_system_folders(),
        links=_system_links(),
        etc=_make_etc(workspace),
        readable=paths,
        tmp=None if is_below_tmp else workspace.scratch,
    )


def is_within(path: str, folder: str) -> bool:
    """Say whether `path` is `folder` or below it; links are not followed."""
    return PurePosixPath(path).is_relative_to(folder)


def is_in_memory(path: str) -> bool:
    """Say whether a path is a memory folder or below one, where mounting makes the folders."""
    return any(is_within(path, folder) for folder in MEMORY_FOLDERS)


def python_path() -> str:
    """Return the folder of the running Python's programs."""
    return os.path.join(os.path.realpath(sys.prefix), "bin")


def _make_etc(workspace: Workspace) -> Path:
    """Prepare an /etc with names and the library cache, without configuration or keys."""
    etc = workspace.base / "etc"
    (etc / os.path.basename(ETC_MOUNTED)).mkdir(parents=True)
    uid = workspace.user.uid if workspace.user else os.getuid()
    gid = workspace.user.uid if workspace.user else os.getgid()
    texts = {
        "passwd": f"root:x:0:0:root:/:/bin/sh\nsandbox:x:{uid}:{gid}:sandbox:/tmp:/bin/sh\n",
        "group": f"root:x:0:\nsandbox:x:{gid}:\n",
        # The default would try further services for every look-up of a name.
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
    }
    for name, text in texts.items():
        (etc / name).write_text(text)
    for name in _ETC_COPIED:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"/etc/{name}", etc / name)
    for path in (etc, *etc.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return etc


@functools.cache
def _system_folders() -> list[str]:
    folders = [path for path in _SYSTEM_FOLDERS if path.is_dir() and not path.is_symlink()]
    return ["/usr", *map(str, folders)]


@functools.cache
def _system_links() -> dict[str, str]:
    return {str(path): os.readlink(path) for path in _SYSTEM_FOLDERS if path.is_symlink()}


@functools.cache
def _python_folders() -> list[str]:
    """Return the folders of the running interpreter that are not in the system's own."""
    folders = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix))
    return [folder for folder in folders if not is_within(folder, "/usr")]
