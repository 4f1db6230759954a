"""Isolation: a rollout that was lost twice runs in a process of its own.

If that process dies while this worker lives, the rollout is the cause; if both die together, the
rollout is lost like every other attempt of this worker (ADR 0033). `execute` uses it on the event
loop. Must not: run an attempt twice.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable

from pipeline.contract.messages import Completion
from pipeline.settings import Settings
from workers.process.activity import Activity
from workers.process.attempt import Attempt
from workers.process.in_flight import InFlight
from workers.process.isolated_child import IsolatedChild
from workers.process.isolated_messages import Preload
from workers.process.journal import MakeFrame

log = logging.getLogger(__name__)

#: A rollout lost this often waits for a free slot: it or one of its neighbours kills workers.
_WAITS_FROM = 5
_CLOSE_S = 5.0


class Isolation:
    """Runs attempts in processes of their own, a few at a time; starts the server when needed.

    Args:
        settings: The worker's, with `worker.isolated_slots`.
        worker_id: The worker's name.
        in_flight: The worker's attempts.
        activity: Counts the model calls of isolated attempts too.
        keep: Takes the frames of isolated attempts' journals.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        in_flight: InFlight,
        activity: Activity,
        *,
        keep: Callable[[MakeFrame], None] | None = None,
    ) -> None:
        self._preload = Preload(settings, worker_id, tuple(sys.path))
        self._in_flight = in_flight
        self._activity = activity
        self._keep = keep
        self._slots = asyncio.Semaphore(settings.worker.isolated_slots)
        self._has_slots = settings.worker.isolated_slots > 0
        self._starting = asyncio.Lock()
        self._server: _ForkServer | None = None

    async def run(self, attempt: Attempt) -> Completion | None:
        """Run an attempt in a process of its own.

        Returns:
            Its completion; None: nothing ran, because no slot is free or no process could start.

        Raises:
            ProcessDied: The process died while this worker lived.
            RolloutError: The process exceeded its time limit without an answer, or its server died.
        """
        waits = self._has_slots and attempt.request.lost_count >= _WAITS_FROM
        if self._slots.locked() and not waits:
            return None
        async with self._slots:
            child = await self._fork()
            if child is None:
                return None
            try:
                return await child.run(attempt, self._in_flight, self._activity)
            finally:
                child.close()

    def close(self) -> None:
        """End the server, and with it all processes."""
        if self._server is not None:
            self._server.close()

    async def _fork(self) -> IsolatedChild | None:
        async with self._starting:
            for is_new in (False, True):
                if is_new or self._server is None:
                    try:
                        self._server = await asyncio.to_thread(_ForkServer, self._preload)
                    except OSError as error:
                        log.warning("No process for an isolated rollout: %s", error)
                        return None
                try:
                    return await IsolatedChild.connect(*self._server.fork(), keep=self._keep)
                except OSError:
                    # The server died since it was last used; the next one is new.
                    self._server.close()
                    self._server = None
        return None


class _ForkServer:
    """A running server; blocks while it starts."""

    def __init__(self, preload: Preload) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                preload.command(theirs.fileno()),
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is for the worker, which lets its attempts end.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(pickle.dumps(preload))

    def fork(self) -> tuple[socket.socket, socket.socket]:
        """Ask for a process; return its channel and its status.

        Raises:
            OSError: The server is gone, or takes no request now.
        """
        (channel, its_channel), (status, its_status) = socket.socketpair(), socket.socketpair()
        with its_channel, its_status:
            try:
                fds = [its_channel.fileno(), its_status.fileno()]
                socket.send_fds(self._control, [b"f"], fds, socket.MSG_DONTWAIT)
            except OSError:
                channel.close()
                status.close()
                raise
        return channel, status

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
