"""A user id for one sandbox, and the ownership of the directories that its commands write.

Used by the local sandboxes when the worker runs as root: root is exempt from the process limit,
may signal every process and read every file, so no untrusted command may run as root. No two open
sandboxes have the same user id, so a sandbox's processes can be counted and found by it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
from pathlib import Path

from workers.sandbox.base import SandboxFailure

_WIDE_RANGE = (1_800_000_000, 1 << 24)
_NARROW_RANGE = (20_000, 40_000)


class SandboxUser:
    """A user id reserved for one sandbox while this object is open."""

    def __init__(self) -> None:
        first, count = _mapped_range()
        for _ in range(64):
            self.uid = first + random.randrange(count)
            # The abstract name is the reservation: the kernel drops it with the process.
            self._reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._reservation.bind(f"\0rollout-sandbox-user-{self.uid}")
            except OSError:
                self._reservation.close()
            else:
                return
        raise SandboxFailure("The sandbox would not start: no free user id for it was found.")

    def close(self) -> None:
        """Release the user id."""
        self._reservation.close()


class FolderOwnership:
    """The owner of a directory tree: the sandbox's user after `hand_over`, until `take_back`.

    Only entries of the directory's own owner change it, on its own file system; no file with
    several names, whose other names may lie outside the tree; no set-user-id program, which would
    lose that bit. Groups stay.
    """

    def __init__(self, root: Path, uid: int) -> None:
        owner = root.stat()
        self._root = root
        self._uid = uid
        # A killed worker did not take the tree back from the user of its sandbox.
        self._owner = 0 if owner.st_uid >= _WIDE_RANGE[0] else owner.st_uid
        self._from = owner.st_uid
        self._group = owner.st_gid
        self._device = owner.st_dev

    def hand_over(self) -> None:
        """Make the sandbox's user the owner."""
        self._change_owner(from_uid=self._from, to_uid=self._uid)

    def take_back(self) -> None:
        """Restore the first owner of every entry; the sandbox's processes must have ended."""
        self._change_owner(from_uid=self._uid, to_uid=self._owner)

    def _change_owner(self, *, from_uid: int, to_uid: int) -> None:
        if not self._root.exists():
            return
        for _, folders, files, folder_fd in os.fwalk(self._root, follow_symlinks=False):
            for name in [*folders, *files]:
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                    if found.st_dev != self._device and name in folders:
                        folders.remove(name)
                    elif found.st_uid == from_uid and _may_change_owner(found, self._device):
                        group = self._group if found.st_gid == self._uid else -1
                        os.chown(name, to_uid, group, dir_fd=folder_fd, follow_symlinks=False)
        with contextlib.suppress(FileNotFoundError):
            os.chown(self._root, to_uid, -1, follow_symlinks=False)


def _may_change_owner(found: os.stat_result, device: int) -> bool:
    if found.st_dev != device:
        return False
    is_program = stat.S_ISREG(found.st_mode) and found.st_mode & (stat.S_ISUID | stat.S_ISGID)
    return stat.S_ISDIR(found.st_mode) or (found.st_nlink == 1 and not is_program)


def _mapped_range() -> tuple[int, int]:
    """Return the first id and the count of a range that this user namespace can use."""
    last = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            last = max(last, first + count)
    return _WIDE_RANGE if last > sum(_WIDE_RANGE) else _NARROW_RANGE
