"""Kills the commands of a worker that was killed.

The local sandboxes mark the processes they start. A shell waits beside this process for its end. If
the process ends without a message to the shell, the shell kills every process with the mark.
`bwrap --die-with-parent` is not enough: it binds its child to the worker only some milliseconds
after the start, and never if the worker dies before. Must not signal a process without the mark.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import subprocess
import threading

from workers.sandbox.base import SandboxFailure

#: Variable of each process that a sandbox starts; its value begins with that of `mark`.
MARK = "ROLLOUT_SANDBOX_ID"
#: Longest wait for the reaper's end when this process ends by itself.
_EXIT_TIMEOUT_S = 5.0
#: Several passes: a process that is just being started shows its mark a moment later.
_SCRIPT = """
read -r message && exit
for pass in 1 2 3 4 5 6 7 8 9 10; do
    for found in $(grep -lsz "^$1" /proc/[0-9]*/environ); do
        found=${found%/environ}
        kill -9 "${found#/proc/}"
    done
    sleep 0.1
done
"""

_token = secrets.token_hex(8)
_lock = threading.Lock()
_reaper: subprocess.Popen[bytes] | None = None


def mark() -> str:
    """Return the mark of this process, the same each time, once its reaper runs.

    The first call starts the reaper, a shell of about a megabyte; a dead one is started again.

    Raises:
        SandboxFailure: The reaper would not start.
    """
    global _reaper
    with _lock:
        if _reaper is None or _reaper.poll() is not None:
            try:
                _reaper = _start()
            except OSError as error:
                raise SandboxFailure(f"The sandbox would not start: {error}") from error
    return _token


def _begin_anew() -> None:
    """Give a forked process a mark of its own: its end must not end its siblings' commands."""
    global _token, _reaper, _lock
    _token, _reaper, _lock = secrets.token_hex(8), None, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _start() -> subprocess.Popen[bytes]:
    # The shell reads the end of file when this process ends: the kernel closes the other end.
    return subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "sh", f"{MARK}={_token}"],
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@atexit.register
def _stop() -> None:
    # At an ordinary end every sandbox has ended its own processes.
    if _reaper is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            _reaper.communicate(b"exit\n", timeout=_EXIT_TIMEOUT_S)
