"""Processes the command line starts: workers, controllers, the demo's offline policy.

Each is noted in a file of the data directory, so that another call finds it again. A noted pid is
a rumour until the process behind it is shown to have started when ours did; nothing is signalled
before that. Logs go to `logs/` of the data directory.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

POLL_S = 0.02
_LOGS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Child:
    """A process that was started here; `mark` tells it from a later one with its pid."""

    kind: str
    pid: int
    mark: str
    stays: bool  #: goes on when the command that started it ends
    log: str
    started_at: str
    place: str = ""  #: tells apart the servers it works with

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return start_mark(self.pid) == self.mark

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still this process."""
        try:
            handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            if self.is_alive and not hasattr(os, "pidfd_open"):
                os.kill(self.pid, number)
            return
        try:
            # Asked after the handle is open: from here on the number cannot come to mean another.
            if self.is_alive:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


class Children:
    """The processes of one data directory.

    Args:
        data_dir: Holds the notes and logs.
    """

    def __init__(self, data_dir: Path) -> None:
        self._notes = data_dir / "processes"
        self._logs = data_dir / "logs"
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def spawn(
        self,
        kind: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stays: bool,
        place: str = "",
        folder: Path | None = None,
    ) -> Child:
        """Start `rollout ARGUMENTS` in a folder (None: this one), detached from the terminal.

        A process that does not stay ends with us, however we end: it reads from a pipe that the
        kernel closes.
        """
        self._notes.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._new_log(kind)
        command = [sys.executable, "-P", "-m", "rollout", *arguments]
        if not stays:
            command.append("--while-stdin")
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if stays else subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )
        self._started[process.pid] = process
        started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        mark = start_mark(process.pid) or "gone"
        child = Child(kind, process.pid, mark, stays, str(log), started_at, place)
        self._note_of(child).write_text(json.dumps(asdict(child)) + "\n")
        return child

    def find(self) -> list[Child]:
        """Return those that run; forgets those that ended."""
        found: list[Child] = []
        for note in sorted(self._notes.glob("*.json")):
            try:
                child = Child(**json.loads(note.read_text()))
            except (OSError, ValueError, TypeError):
                continue
            if child.is_alive:
                found.append(child)
            else:
                note.unlink(missing_ok=True)
        return found

    def exit_code(self, child: Child) -> int | None:
        """Return how one of our own ended, None while it runs."""
        process = self._started.get(child.pid)
        return process.poll() if process else (None if child.is_alive else 0)

    def stop(self, children: Iterable[Child], *, timeout_s: float) -> None:
        """Ask processes to end, wait for them, and kill what has not ended in time.

        An interruption kills at once and is passed on.
        """
        left = list(children)
        try:
            for child in left:
                child.send(signal.SIGTERM)
            left = self._wait_gone(left, timeout_s)
        finally:
            for child in left:
                child.send(signal.SIGKILL)
            self._wait_gone(left, 5)

    def _wait_gone(self, children: list[Child], timeout_s: float) -> list[Child]:
        """Wait until all are gone; return those that are not, taking the others out of the list."""
        deadline = time.monotonic() + timeout_s
        while children:
            for child in list(children):
                if self._is_gone(child):
                    children.remove(child)
                    self._note_of(child).unlink(missing_ok=True)
            if children and time.monotonic() > deadline:
                break
            time.sleep(POLL_S if children else 0)
        return children

    def _is_gone(self, child: Child) -> bool:
        process = self._started.get(child.pid)
        if process is not None and process.poll() is not None:
            if process.stdin:
                process.stdin.close()
            return True
        return not child.is_alive

    def _note_of(self, child: Child) -> Path:
        return self._notes / f"{child.kind}-{child.pid}.json"

    def _new_log(self, kind: str) -> Path:
        for old in sorted(self._logs.glob(f"{kind}-*.log"))[: -(_LOGS_KEPT - 1)]:
            old.unlink(missing_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return self._logs / f"{kind}-{stamp}-{secrets.token_hex(2)}.log"


def start_mark(pid: int) -> str | None:
    """Return what tells a live process from any other that ever has its pid, None if it is gone."""
    if os.path.isdir("/proc/self"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
    shown = subprocess.run(
        ["ps", "-p", str(pid), "-o", "state=,lstart="],
        capture_output=True,
        check=False,
        text=True,
        env={"PATH": os.defpath, "LC_ALL": "C"},
    ).stdout.strip()
    return None if not shown or shown.startswith("Z") else shown.partition(" ")[2].strip()


def log_end(child: Child, lines: int = 12) -> str:
    """Return the last lines of a process's log."""
    from pipeline.embedded.processes import log_tail

    return log_tail(Path(child.log), lines=lines)
