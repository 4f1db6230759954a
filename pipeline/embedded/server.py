"""The common base of the two private servers: identify, start and stop the server's process.

A server and its children inherit a descriptor with a lock on `alive` in its directory. While any of
them runs, the lock is held, so no second server starts on the same data. The kernel frees the lock
when the last one ends. Pids are only used to find and stop a server, not to exclude a second one.
"""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from pipeline.contract.errors import NotAllowed, ServiceUnavailable
from pipeline.embedded.processes import POLL_S, Identity, StopSignals, log_tail, stop_processes
from pipeline.embedded.server_paths import ServerPaths


class Server(ABC):
    """One private server; call `start` and `stop` with the data directory's lock held."""

    name: ClassVar[str]
    title: ClassVar[str]
    socket_name: ClassVar[str]
    not_as_root: ClassVar[bool] = False
    stop_signals: ClassVar[StopSignals]

    def __init__(self, paths: ServerPaths, *, durable: bool) -> None:
        self.paths = paths
        self.log = paths.home / f"{self.name}.log"
        self._socket = paths.sockets / self.socket_name
        self._durable = durable

    @property
    @abstractmethod
    def _identity(self) -> Identity:
        """The marks by which the server's process is recognised."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The server's URL for clients."""

    @abstractmethod
    def _pid_in_file(self) -> int:
        """Return the pid in the server's own pid file, 0 if there is none."""

    @abstractmethod
    def _wait_ready(self, pid: int, deadline: float) -> bool:
        """Wait until the server is ready; False if it ended, lost its socket, or at `deadline`."""

    @abstractmethod
    def _has_lost_socket(self) -> bool:
        """Say whether the live server has lost its socket, so that no client can connect."""

    @abstractmethod
    def _launch(self, life_lock: int, deadline: float) -> None:
        """Start the server and wait until it is ready, or raise `ServiceUnavailable`."""

    def running_pid(self) -> int | None:
        """Return the pid of our live server, whether it is starting up or ready."""
        pid = self._pid_in_file()
        return pid if self._identity.matches(pid) else None

    def start(self, timeout_s: float) -> None:
        """Start the server unless it is ready.

        Raises:
            ServiceUnavailable: The programs are missing, or the server is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if (pid := self.running_pid()) is not None:
                if self._wait_ready(pid, deadline):
                    return
                self._stop_if_socket_is_lost()
            elif (life_lock := self._take_life_lock()) is not None:
                try:
                    return self._launch(life_lock, deadline)
                finally:
                    os.close(life_lock)
            elif time.monotonic() > deadline:
                raise self._does_not_serve("Processes of an earlier server still run.")
            else:
                time.sleep(POLL_S)

    def stop(self) -> bool:
        """Stop the server if it runs; return whether it ran.

        Raises:
            NotAllowed: The server belongs to another user, or survived every signal.
        """
        if (pid := self.running_pid()) is None:
            return False
        try:
            left = stop_processes({pid: lambda: self._identity.matches(pid)}, self.stop_signals)
        except PermissionError as error:
            raise NotAllowed(
                f"{self.title} (pid {pid}) belongs to another user.",
                remedy="Stop it as the user that started it.",
            ) from error
        if left:
            raise NotAllowed(f"{self.title} (pid {pid}) does not stop: it outlived every signal.")
        return True

    def _stop_if_socket_is_lost(self) -> None:
        if (pid := self.running_pid()) is None:
            return
        if not self._has_lost_socket():
            raise self._does_not_serve(f"Process {pid} recovers or loads its data, or is stopped.")
        self.stop()

    def _take_life_lock(self) -> int | None:
        fd = os.open(self.paths.home / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _would_not_start(self, since: int) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"The private {self.title} server did not start.",
            why=f"Its log ends with:\n{log_tail(self.log, since=since)}\n",
            remedy=f"The whole log is in {self.log}.",
            code="E211",
        )

    def _does_not_serve(self, why: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"The private {self.title} server does not serve.",
            why=why,
            remedy=f"See {self.log}; `rollout down` stops the server.",
            code="E212",
        )
