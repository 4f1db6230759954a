"""The files under a sandbox's root, local or in a container: read, write, remove, list.

Used by the tools that edit files. Every method raises OSError as `open` would. Must not reach a
file outside the root.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat

from workers.sandbox.base import Sandbox
from workers.sandbox.confined_folder import ConfinedFolder

MAX_LISTED = 2000


class LocalFiles:
    """The files of a directory of this machine, through `ConfinedFolder`."""

    def __init__(self, folder: ConfinedFolder) -> None:
        self._folder = folder

    async def read(self, path: str) -> bytes:
        """Return a file's content."""
        return await asyncio.to_thread(self._folder.read, path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making the directories above it."""
        await asyncio.to_thread(self._folder.write, path, data, make_folders=True)

    async def remove(self, path: str) -> None:
        """Remove a file."""
        await asyncio.to_thread(self._folder.remove, path)

    async def is_folder(self, path: str) -> bool:
        """Say whether a directory is there."""
        try:
            found = await asyncio.to_thread(self._folder.stat, path)
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(found.st_mode)

    async def list(self, path: str, depth: int) -> list[str]:
        """Return names below a directory, directories with a slash, hidden ones left out."""
        return await asyncio.to_thread(self._list, path, depth)

    def _list(self, path: str, depth: int) -> list[str]:
        names: list[str] = []
        start = self._folder.open_folder(path)
        try:
            for where, folders, files, _ in os.fwalk(".", dir_fd=start, follow_symlinks=False):
                level = where.count("/")
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                shown = [f"{name}/" for name in folders]
                shown += [name for name in sorted(files) if not name.startswith(".")]
                names += [f"{where}/{name}".removeprefix("./") for name in shown]
                if level + 1 >= depth:
                    folders.clear()
                if len(names) >= MAX_LISTED:
                    break
        finally:
            os.close(start)
        return sorted(names[:MAX_LISTED])


class ContainerFiles:
    """The files of a container, by commands in it; the container itself confines them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def read(self, path: str) -> bytes:
        """Return a file's content."""
        return await self._sandbox.read_file(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole, making the directories above it."""
        await self._sandbox.write_file(path, data)

    async def remove(self, path: str) -> None:
        """Remove a file."""
        await self._checked(["rm", "--", path], path)

    async def is_folder(self, path: str) -> bool:
        """Say whether a directory is there."""
        return (await self._sandbox.run(["test", "-d", path])).succeeded

    async def list(self, path: str, depth: int) -> list[str]:
        """Return names below a directory, directories with a slash, hidden ones left out."""
        # No -printf: the image's find may be busybox's.
        folders = ["find", ".", "-mindepth", "1", "-maxdepth", str(depth), "-not", "-path", "*/.*"]
        script = '"$@" -type d -exec printf "%s/\\n" {} + && "$@" -not -type d -print'
        listed = await self._checked(["sh", "-c", script, "sh", *folders], path, cwd=path)
        names = [name.removeprefix("./") for name in listed.splitlines() if name.startswith("./")]
        return sorted(names[:MAX_LISTED])

    async def _checked(self, command: list[str], path: str, cwd: str | None = None) -> str:
        result = await self._sandbox.run(command, cwd=cwd)
        if not result.succeeded:
            reason = result.stderr.strip().splitlines()
            raise OSError(errno.EIO, reason[-1] if reason else "The command failed", path)
        return result.stdout


Files = LocalFiles | ContainerFiles


def files_of(sandbox: Sandbox) -> Files:
    """Return the files of a sandbox."""
    folder = sandbox.local_files
    return ContainerFiles(sandbox) if folder is None else LocalFiles(folder)
