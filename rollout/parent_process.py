"""The process that started this one; long-running commands end with it on request.

`supervision.py` starts such commands with `--while-stdin`, and holds the other end of the pipe.
"""

from __future__ import annotations

import os
import signal
import threading


def end_with_stdin() -> None:
    """End this process as on SIGTERM when its parent process has ended."""

    def wait() -> None:
        # Not through sys.stdin, because its lock would be held when the interpreter ends.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
