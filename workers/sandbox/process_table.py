"""Finds processes in /proc, and kills those of one command.

Used by the local sandboxes and by `child_process`. Without a /proc no process is found. Must not
signal a process that is not named by its group, its user or its mark.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KILL_PASSES = 32
#: States in which a process needs the signal no more; a zombie has ended, but is not reaped.
_DONE_STATES = {signal.SIGSTOP: "TtZX", signal.SIGKILL: "ZX"}


def kill_group(pid: int) -> None:
    """Kill the process group that `pid` leads; a missing group is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_user(uid: int) -> None:
    """Kill every process of a user, in any session or group."""
    _kill(lambda pid: os.stat(f"/proc/{pid}").st_uid == uid)


def kill_marked(variable: str) -> None:
    """Kill every process whose environment has this `NAME=value`, in any session or group."""
    entry = variable.encode()
    _kill(lambda pid: entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def count_tasks(uid: int) -> int:
    """Return the number of a user's processes and threads."""
    count = 0
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def tree_memory(pid: int) -> int:
    """Return the bytes of memory that a process and its descendants do not share with files."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(OSError, ValueError):  # the process ended meanwhile
            _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
            total += (int(resident) - int(shared)) * _PAGE_BYTES
    return total


def unlinked_files(pid: int, devices: Collection[int]) -> list[os.stat_result]:
    """Return the deleted files on some devices that a process or a descendant has open.

    With the process 0 there are none.
    """
    found: dict[tuple[int, int], os.stat_result] = {}
    for process in _tree(pid) if pid else ():
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    each = os.stat(f"/proc/{process}/fd/{fd}")
                    if not each.st_nlink and each.st_dev in devices and stat.S_ISREG(each.st_mode):
                        found[each.st_dev, each.st_ino] = each
    return list(found.values())


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        yield process
        with contextlib.suppress(OSError, ValueError):  # the process ended meanwhile
            for thread in os.listdir(f"/proc/{process}/task"):
                children = Path(f"/proc/{process}/task/{thread}/children").read_text()
                waiting += [int(child) for child in children.split()]


def _kill(is_wanted: Callable[[int], bool]) -> None:
    # Stopped first: a stopped process cannot fork away from the second signal.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for _ in range(_KILL_PASSES):
            if not _signal(is_wanted, number):
                break


def _signal(is_wanted: Callable[[int], bool], number: signal.Signals) -> int:
    """Signal the wanted processes that still need the signal; return their number."""
    count = 0
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            if is_wanted(pid) and _needs_signal(pid, number):
                os.kill(pid, number)
                count += 1
    return count


def _needs_signal(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/stat").read_bytes()
    # The state follows the program's name, which may itself hold brackets and spaces.
    return chr(status[status.rindex(b")") + 2]) not in _DONE_STATES[number]


def _process_ids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
