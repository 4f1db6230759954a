"""Processes of a deployment: start, signal and end them, without a signal to a foreign process.

A child that was not waited for keeps its pid, so a signal cannot reach another process. Servers
that are not our children are identified by a pidfd. Must not: know the programs.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]


class Started(Protocol):
    """A process that was started: the part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: signal.Signals, /) -> None: ...


#: Starts a module with arguments, its whole environment, and a file that its output is appended to.
Starter = Callable[[str, Sequence[str], Mapping[str, str], Path], Started]


def start_python(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> Started:
    """Start a module in an interpreter of its own."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


class OwnProcess:
    """A process that only we signal and wait for."""

    def __init__(self, started: Started) -> None:
        self._popen = started

    @property
    def pid(self) -> int:
        """The pid; not for signals."""
        return self._popen.pid

    def is_alive(self) -> bool:
        """Whether the process has not ended; a stopped process counts."""
        return self._popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended gets none."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        self._popen.wait(timeout=20)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the process; return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        return self._popen.wait(timeout_s)

    def end(self, timeout_s: float = 20) -> None:
        """End the process by SIGTERM, after `timeout_s` by SIGKILL."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


def signal_server(find_pid: Callable[[], int | None], number: signal.Signals) -> bool:
    """Send a signal to a server that is not our child; return whether it was running.

    Args:
        find_pid: Returns the pid after identifying the server's process.
        number: The signal; after one that ends processes, the function waits for the end.
    """
    pid = find_pid()
    if pid is None:
        return False
    handle = os.pidfd_open(pid)
    try:
        # Check again with the handle open: from then on the pid cannot be reused.
        if find_pid() != pid:
            return False
        signal.pidfd_send_signal(handle, number)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            gone, _, _ = select.select([handle], [], [], 30)
            if not gone:
                raise RuntimeError(f"the server with pid {pid} does not end")
        return True
    finally:
        os.close(handle)
