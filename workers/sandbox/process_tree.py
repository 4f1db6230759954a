"""How much memory a process and all below it hold together.

Called by `child_process` while a command runs: the kernel bounds each process, and many small ones
could still fill the machine. Where there is no /proc it sees nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree_memory(pid: int) -> int:
    """Return the bytes of memory that a process and its descendants do not share with files."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            _, resident, shared, *_ = Path(f"/proc/{one}/statm").read_text().split()
            total += (int(resident) - int(shared)) * _PAGE
            for thread in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{thread}/children").read_text()
                waiting += [int(child) for child in children.split()]
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return total
