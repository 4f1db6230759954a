"""Processes of a deployment: started, signalled only while they are certainly ours, ended.

A child that was not waited for keeps its pid, so a signal to it cannot reach a stranger. Servers
that are no children of ours are held by a descriptor. Must not: know what runs inside.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class OwnProcess:
    """A child of this process.

    Args:
        name: For people.
        command: Program and arguments.
        environment: The whole environment.
        log: File its output is appended to.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """Its pid; only for looking."""
        return self._popen.pid

    def is_alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended gets none."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._popen.wait(timeout=20)

    def wait(self, timeout_s: float) -> int:
        """Return its exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        return self._popen.wait(timeout_s)

    def end(self, timeout_s: float = 20) -> None:
        """End it in order, or by force."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()


def signal_server(find_pid: Callable[[], int | None], number: signal.Signals) -> bool:
    """Send a signal to a server that is no child of ours; say whether there was one.

    Args:
        find_pid: Returns the pid once the process behind it is shown to be the server meant.
        number: The signal; after one that ends processes, waits until it is gone.
    """
    pid = find_pid()
    if pid is None:
        return False
    handle = os.pidfd_open(pid)
    try:
        # Asked again with the handle open: the number cannot come to mean another process now.
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
