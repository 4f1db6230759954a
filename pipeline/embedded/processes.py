"""Processes by pid: start a server detached, recognise a process again, stop it.

Used by the two servers of this package, and by `rollout/supervision.py` for workers and
controllers. After a crash or a reboot a pid may belong to another process, so none is signalled
before the process behind it is recognised.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.01
LOG_BYTES = 16 * 2**20

#: Signals to send one after the other, each with the seconds to wait for the exit.
StopLadder = Sequence[tuple[signal.Signals, float]]


@dataclass(frozen=True, slots=True)
class Account:
    """The operating system user a server runs as when we are root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a process the server meant: one of its programs, working in its directory.

    Where another process's directory cannot be read, one of `marks` must stand in its command line.
    """

    programs: tuple[str, ...]
    directory: Path
    marks: tuple[str, ...]

    def matches(self, pid: int) -> bool:
        """Say whether `pid` is alive and is this server; False for a zombie."""
        if pid <= 1:
            return False
        if not os.path.isdir("/proc/self"):
            return self._matches_command(_ps(pid, "command="))
        try:
            if not self._names_program(Path(f"/proc/{pid}/comm").read_text()):
                return False
            return os.path.samefile(f"/proc/{pid}/cwd", self.directory)
        except PermissionError:
            # Root in a container may lack the right to look into another user's process.
            return self._matches_command(_proc_command(pid))
        except OSError:
            return False

    def _matches_command(self, command: str) -> bool:
        return self._names_program(command) and any(mark in command for mark in self.marks)

    def _names_program(self, text: str) -> bool:
        return any(program in text for program in self.programs)


def run_as(account: Account | None) -> dict[str, Any]:
    """Return the `subprocess` arguments that run a child as `account` (None: as we are)."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def server_environment() -> dict[str, str]:
    """Return a child's environment: none of the caller's `PG*` variables, locale or secrets."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", **kept}


def spawn_detached(
    argv: Sequence[str], *, log: Path, life_lock: int, account: Account | None = None
) -> int:
    """Start a server that outlives us: own session, adopted by init, output to `log`.

    Returns its pid; the server keeps the descriptor `life_lock` open. A log past `LOG_BYTES` is put
    aside first, as `*.log.1`.

    The shell in between is what hands the server to init: as our own child it would stay a zombie
    after a crash for as long as we live.
    """
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
    script = 'umask 077; log=$1; shift; "$@" >>"$log" 2>&1 </dev/null & echo $!'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(log), *argv],
        cwd="/",
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=(life_lock,),
        start_new_session=True,
        check=True,
        **run_as(account),
    )
    return int(done.stdout)


def start_mark(pid: int) -> str | None:
    """Return what tells a live process from any other that ever has its pid, None if it is gone.

    A zombie is gone.
    """
    if os.path.isdir("/proc/self"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
    shown = _ps(pid, "state=,lstart=").strip()
    return None if not shown or shown.startswith("Z") else shown.partition(" ")[2].strip()


def process_exists(pid: int) -> bool:
    """Say whether `pid` is some live process, of any user."""
    return start_mark(pid) is not None


def stop_processes(meant: Mapping[int, Callable[[], bool]], ladder: StopLadder) -> list[int]:
    """Stop processes together and return the pids of those that outlived every signal.

    Args:
        meant: For each pid: whether it still is the process meant; others are left alone.
        ladder: The signals.

    Raises:
        PermissionError: One belongs to another user.
    """
    with contextlib.ExitStack() as stack:
        # A check after its handle is open: from then on the pid cannot come to mean another.
        opened = [(stack.enter_context(_Handle(pid)), is_meant) for pid, is_meant in meant.items()]
        left = [handle for handle, is_meant in opened if is_meant()]
        for number, wait_s in ladder:
            for handle in left:
                handle.send(number)
            deadline = time.monotonic() + wait_s
            left = [handle for handle in left if not handle.wait_gone(deadline)]
    return [handle.pid for handle in left]


def log_tail(log: Path, *, since: int = 0, lines: int = 12) -> str:
    """Return the last lines that were written to `log` after byte `since`."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(since, stream.tell() - 8192))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(log is empty)"


class _Handle(contextlib.AbstractContextManager["_Handle"]):
    """One process, by descriptor where the system has that, else by number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._fd = None

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def send(self, number: signal.Signals) -> None:
        # A stopped process (SIGSTOP) sees a signal only once it is continued.
        with contextlib.suppress(ProcessLookupError):
            for each in (number, signal.SIGCONT):
                if self._fd is None:
                    os.kill(self.pid, each)
                else:
                    signal.pidfd_send_signal(self._fd, each)

    def wait_gone(self, deadline: float) -> bool:
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        while process_exists(self.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _proc_command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _ps(pid: int, columns: str) -> str:
    shown = subprocess.run(
        ["ps", "-ww", "-p", str(pid), "-o", columns],
        capture_output=True,
        check=False,
        env={"PATH": os.defpath, "LC_ALL": "C"},
    )
    return shown.stdout.decode("utf-8", "replace")
