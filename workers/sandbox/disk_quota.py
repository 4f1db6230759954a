"""The disk quota of a local sandbox: the size of its folders is measured while commands run.

Used by `child_process` for the local kinds. A quota of the file system would need privileges, and a
file system in memory would not last from one command to the next. Must not: block the event loop,
or follow a link on purpose.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from workers.sandbox.process_table import unlinked_files

#: A longer command is also measured after this time: not every file system reports its free space
#: at once.
_MAX_AGE_S = 5.0
#: While a command runs, measurements take at most this share of the time.
_MAX_LOAD = 0.05
#: An empty file or folder counts too: file systems run out of them.
_MIN_ENTRY_BYTES = 4096


class DiskQuota:
    """The limit of the bytes that commands may add to a sandbox's folders.

    Args:
        folders: The folders that commands can write to.
        limit_bytes: The quota.
        was_given: Whether the folders may hold files already.
    """

    def __init__(self, folders: Sequence[Path], limit_bytes: int, *, was_given: bool) -> None:
        self.limit_bytes = limit_bytes
        self._folders = [str(folder) for folder in folders]
        self._first_free = self._most_free = self._free_bytes()
        self._next_at = 0.0
        self._base = self._measure(0) if was_given else 0
        self._used = 0
        self._measured_at = time.monotonic()

    @property
    def allowed_bytes(self) -> int:
        """The limit for a command that starts now.

        With a used-up quota the limit is the present use, so that a command can delete files.
        """
        return max(self.limit_bytes, self._used)

    async def is_exceeded(
        self, allowed_bytes: int, pid: int, running_s: float, *, has_ended: bool = False
    ) -> bool:
        """Say whether the folders hold more than `allowed_bytes`.

        Nearly free as long as the file system's free space hardly changes.

        Args:
            allowed_bytes: As `allowed_bytes` was at the command's start.
            pid: The command's process; deleted files that it or a descendant has open count, too.
            running_s: The command's age.
            has_ended: Whether the command is over.
        """
        if not self._is_due(allowed_bytes, running_s, has_ended):
            return False
        begun = time.monotonic()
        self._most_free = self._free_bytes()
        self._used = max(0, await asyncio.to_thread(self._measure, pid) - self._base)
        self._measured_at = time.monotonic()
        self._next_at = self._measured_at + (self._measured_at - begun) / _MAX_LOAD
        return self._used > allowed_bytes

    def _is_due(self, allowed_bytes: int, running_s: float, has_ended: bool) -> bool:
        free = self._free_bytes()
        self._most_free = max(self._most_free, free)
        if has_ended and self._used > self.limit_bytes:
            return True
        now = time.monotonic()
        if now < self._next_at and not has_ended:
            return False
        # Bytes written since the last measurement are missing from the file system's free space.
        if self._used + self._most_free - free > allowed_bytes:
            return True
        return running_s > _MAX_AGE_S and now > self._measured_at + _MAX_AGE_S

    def _free_bytes(self) -> int:
        found = [os.statvfs(folder) for folder in self._folders if os.path.isdir(folder)]
        return min((each.f_bavail * each.f_frsize for each in found), default=0)

    def _measure(self, pid: int) -> int:
        used, is_complete = 0, True
        linked: set[tuple[int, int]] = set()
        waiting = list(self._folders)
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        found = entry.stat(follow_symlinks=False)
                        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                            if (found.st_dev, found.st_ino) in linked:
                                continue
                            linked.add((found.st_dev, found.st_ino))
                        used += max(found.st_blocks * 512, _MIN_ENTRY_BYTES)
                        if stat.S_ISDIR(found.st_mode):
                            waiting.append(entry.path)
            except FileNotFoundError:  # it was deleted meanwhile
                continue
            except OSError:
                is_complete = False
        devices = {os.stat(folder).st_dev for folder in self._folders if os.path.isdir(folder)}
        used += sum(each.st_blocks * 512 for each in unlinked_files(pid, devices))
        if is_complete:
            return used
        # A folder that cannot be read may hold anything: all that was written counts.
        return max(used, self._first_free - self._free_bytes())
