"""Signals of a command's process: interruption, and the end with its parent process.

`supervision.py` starts commands with `--while-stdin`, and holds the other end of the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

#: Exit code of an interrupted command.
EXIT_INTERRUPTED = 130


def interrupt_on(*numbers: signal.Signals) -> None:
    """Let these signals raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


def end_with_stdin() -> None:
    """End this process as on SIGTERM when its parent process has ended."""

    def wait() -> None:
        # Not through sys.stdin, because its lock would be held when the interpreter ends.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
