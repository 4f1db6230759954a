"""What the two private servers have in common: one life at a time, recognised, started, stopped.

A server inherits a descriptor with a lock on `alive` in its directory, and so do its children.
While any of them lives the lock is held, whatever pid files say, and no second server starts on the
same data; the kernel frees it at the last one's end. Pids serve to find and stop a server, not to
guard it.
"""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from pipeline.contract.errors import NotAllowed, ServiceUnavailable
from pipeline.embedded.processes import POLL_S, Identity, StopLadder, log_tail, stop_processes
from pipeline.embedded.server_paths import ServerPaths


class Server(ABC):
    """One private server; call `start` and `stop` with the data directory's lock held."""

    name: ClassVar[str]
    title: ClassVar[str]
    stop_ladder: ClassVar[StopLadder]

    def __init__(self, paths: ServerPaths, identity: Identity) -> None:
        self.paths = paths
        self.log = paths.home / f"{self.name}.log"
        self._identity = identity

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients find the server."""

    @abstractmethod
    def _noted_pid(self) -> int:
        """Return the pid in the server's own pid file, 0 if there is none."""

    @abstractmethod
    def _wait_ready(self, pid: int, deadline: float) -> bool:
        """Wait until the server serves; False if it ended, is deaf, or `deadline` passed."""

    @abstractmethod
    def _is_deaf(self) -> bool:
        """Say whether the live server can never be reached: its socket is gone."""

    @abstractmethod
    def _launch(self, life_lock: int, deadline: float) -> None:
        """Start the server and wait until it serves, or raise `ServiceUnavailable`."""

    def running_pid(self) -> int | None:
        """Return the pid of our own live server, starting up or ready."""
        pid = self._noted_pid()
        return pid if self._identity.matches(pid) else None

    def start(self, timeout_s: float) -> None:
        """Make sure that the server serves.

        Raises:
            ServiceUnavailable: Its programs are missing, or it does not serve in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if (pid := self.running_pid()) is not None:
                if self._wait_ready(pid, deadline):
                    return
                self._stop_if_deaf()
            elif (life_lock := self._take_life_lock()) is not None:
                try:
                    return self._launch(life_lock, deadline)
                finally:
                    os.close(life_lock)
            elif time.monotonic() > deadline:
                raise self._does_not_serve("What is left of an earlier server still runs.")
            else:
                time.sleep(POLL_S)

    def stop(self) -> bool:
        """Stop the server if it runs; say whether it did.

        Raises:
            NotAllowed: It belongs to another user, or outlived every signal of the ladder.
        """
        if (pid := self.running_pid()) is None:
            return False
        try:
            left = stop_processes({pid: lambda: self._identity.matches(pid)}, self.stop_ladder)
        except PermissionError as error:
            raise NotAllowed(
                f"{self.title} (pid {pid}) belongs to another user.",
                remedy="Stop it as the user that started it.",
            ) from error
        if left:
            raise NotAllowed(f"{self.title} (pid {pid}) does not stop: it outlived every signal.")
        return True

    def _stop_if_deaf(self) -> None:
        if (pid := self.running_pid()) is None:
            return
        if not self._is_deaf():
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
