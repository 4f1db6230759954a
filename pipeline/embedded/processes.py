"""Processes by pid: start a server detached, recognise a process again, stop it.

The two servers of this package use it, and `rollout/supervision.py` for workers and controllers.
After a crash or a reboot a pid may belong to another process, so a process is identified before it
is signalled.
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
StopSignals = Sequence[tuple[signal.Signals, float]]


@dataclass(frozen=True, slots=True)
class Account:
    """The operating system user that runs a server if we are root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a server's process by its program and its working directory.

    If the working directory cannot be read, the command line must contain one of `marks`.
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
    """Return the `subprocess` arguments that run a child as `account` (None: as our user)."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def server_environment() -> dict[str, str]:
    """Return a child's environment, without the caller's `PG*` variables, locale and secrets."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", **kept}


def spawn_detached(
    argv: Sequence[str], *, log: Path, life_lock: int, account: Account | None = None
) -> int:
    """Start a server that outlives us: own session, adopted by init, output to `log`.

    Returns the pid; the server keeps the descriptor `life_lock` open. A log larger than `LOG_BYTES`
    is first renamed to `*.log.1`.

    The shell in between ends at once, so that init adopts the server. As our own child a crashed
    server would remain a zombie until we end.
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
    """Return the start time of a process (on Linux with the boot id), None if it has ended.

    Pid and start time identify a process, because another one with its pid starts at another time.
    A zombie counts as ended.
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
    """Say whether `pid` is a live process of any user."""
    return start_mark(pid) is not None


def stop_processes(targets: Mapping[int, Callable[[], bool]], signals: StopSignals) -> list[int]:
    """Stop processes together and return the pids of those that survived every signal.

    Args:
        targets: For each pid, a check that the pid still belongs to the intended process. Processes
            that fail it get no signal.
        signals: The signals, sent one after the other.

    Raises:
        PermissionError: A process belongs to another user.
    """
    with contextlib.ExitStack() as stack:
        # Check after opening the handle: from then on the pid cannot be reused.
        handles = {pid: stack.enter_context(_Handle(pid)) for pid in targets}
        left = [handles[pid] for pid, is_target in targets.items() if is_target()]
        for number, wait_s in signals:
            for handle in left:
                handle.send(number)
            deadline = time.monotonic() + wait_s
            left = [handle for handle in left if not handle.wait_gone(deadline)]
    return [handle.pid for handle in left]


def log_tail(log: Path, *, since: int = 0, lines: int = 12) -> str:
    """Return the last lines of `log` after byte `since`."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(since, stream.tell() - 8192))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(log is empty)"


class _Handle(contextlib.AbstractContextManager["_Handle"]):
    """One process, by pidfd if the system supports it, else by pid."""

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
        # A stopped process (SIGSTOP) handles a signal only after SIGCONT.
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
