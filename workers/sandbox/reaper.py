"""What ends the commands of a worker that was killed.

The local sandboxes mark the processes they start. A shell waits beside this process for its end;
when that comes without a farewell, it kills what carries the mark. `bwrap --die-with-parent` alone
is not enough: what it starts is bound to the worker only some milliseconds later, and never if the
worker dies before. Must not touch a process without the mark.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import subprocess
import threading

from workers.sandbox.base import SandboxFailure

#: In the environment of each process that a sandbox starts; begins with what `mark` returns.
MARK = "ROLLOUT_SANDBOX_ID"
#: Longest wait for the reaper's end when this process ends by itself.
_FAREWELL_S = 5.0
#: Several passes: one that is just being started shows its mark a moment later.
_SCRIPT = """
read -r farewell && exit
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
    """Return the mark of this process, the same each time; whoever looks for it is there.

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


def _start() -> subprocess.Popen[bytes]:
    # It reads the end of file when nobody can write any more: the kernel closes our end.
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
def _say_farewell() -> None:
    # An ordinary end: every sandbox has ended its own.
    if _reaper is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            _reaper.communicate(b"farewell\n", timeout=_FAREWELL_S)
