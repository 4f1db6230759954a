"""Server processes by pid: start one detached, recognise it again, stop it.

Used by the two servers of this package. A pid found in a file is a rumour (crash, reboot, reuse):
nothing here trusts or signals one before the process behind it is shown to be the server meant.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import NotAllowed

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
            return self._matches_command(_ps_command(pid))
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


def process_exists(pid: int) -> bool:
    """Say whether `pid` is some live process, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return os.path.isdir("/proc/self") is False
    return state not in ("Z", "X")


def stop_process(pid: int, identity: Identity, ladder: StopLadder) -> None:
    """Stop the server `pid` and wait until it is gone; does nothing if the pid is another's.

    Raises:
        NotAllowed: The server belongs to another user, or outlived every signal of the ladder.
    """
    with _handle(pid) as handle:
        # Checked after the handle is open: from here on the number cannot come to mean another.
        if not identity.matches(pid):
            return
        for number, wait_s in ladder:
            try:
                handle.send(number)
            except ProcessLookupError:
                return
            except PermissionError as error:
                raise NotAllowed(
                    f"{identity.programs[0]} (pid {pid}) belongs to another user.",
                    remedy="Stop it as the user that started it.",
                ) from error
            if handle.wait_gone(wait_s):
                return
    raise NotAllowed(
        f"{identity.programs[0]} (pid {pid}) does not stop.", why="It outlived every signal."
    )


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


@dataclass(slots=True)
class _Handle:
    """One process, by descriptor where the system has that, else by number."""

    pid: int
    fd: int | None

    def send(self, number: signal.Signals) -> None:
        # A stopped process (SIGSTOP) sees a signal only once it is continued.
        for each in (number, signal.SIGCONT):
            if self.fd is None:
                os.kill(self.pid, each)
            else:
                signal.pidfd_send_signal(self.fd, each)

    def wait_gone(self, timeout_s: float) -> bool:
        if self.fd is not None:
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        deadline = time.monotonic() + timeout_s
        while process_exists(self.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


@contextmanager
def _handle(pid: int) -> Iterator[_Handle]:
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        fd = None
    try:
        yield _Handle(pid, fd)
    finally:
        if fd is not None:
            os.close(fd)


def _proc_command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    except OSError:
        return ""


def _ps_command(pid: int) -> str:
    shown = subprocess.run(
        ["ps", "-ww", "-p", str(pid), "-o", "command="], capture_output=True, check=False
    )
    return shown.stdout.decode("utf-8", "replace")
