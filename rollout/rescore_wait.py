"""A rescore's trajectories, and the wait for their verdicts with a display of the progress.

`rescoring.py` uses it. Must not: start a process, or request a score.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from rich.status import Status
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, WaitTimeout
from pipeline.store.engine import RESCORED_CHANNEL, Listener, transact
from pipeline.store.rescore_requests import count_rescores
from pipeline.store.runs import Run
from rollout.output import console, note

_POLL_S = 0.5
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class RescoreJob:
    """The trajectories to score, the reward, and the request queue."""

    run: Run
    reward: str
    error_class: ErrorClass | None
    queue: str
    is_ours: bool  #: only workers of this command read the queue
    plugins: tuple[str, ...]  #: plug-ins of these workers
    total: int  #: number of trajectories


class RescoreWait:
    """Waits until no verdict is missing; the store holds them.

    Args:
        engine: The trajectory store.
        job: The trajectories that are to be scored.
        timeout_s: Longest time without any verdict.
    """

    def __init__(self, engine: Engine, job: RescoreJob, *, timeout_s: float) -> None:
        self.total = job.total
        self.scored = 0
        self.failed = 0
        self.reason: str | None = None  #: error of one of the failed requests
        self._engine = engine
        self._job = job
        self._timeout_s = timeout_s
        self._verdict_at = self._line_at = time.monotonic()
        self._status: Status | None = None

    def __str__(self) -> str:
        return f"{self.scored} of {self.total} trajectories were scored"

    def wait(self, publish: Callable[[], int], check: Callable[[], None]) -> None:
        """Wait until no verdict is missing, and show progress.

        Args:
            publish: Publishes some requests that are due; returns how many.
            check: Called about twice a second; raises if the wait has become useless.

        Raises:
            WaitTimeout: No verdict came for too long.
        """
        with ExitStack() as stack:
            listener = Listener(self._engine, RESCORED_CHANNEL)
            stack.callback(listener.close)
            if sys.stderr.isatty():
                self._status = stack.enter_context(console(sys.stderr).status(str(self)))
            while self._count_missing():
                if not publish():
                    listener.wait(_POLL_S)
                check()
                self._show()
                if self._silent_s() >= self._timeout_s and self._count_missing():
                    raise self._timeout()

    def _count_missing(self) -> int:
        """Read the numbers of verdicts; return how many are missing."""
        count = transact(self._engine, count_rescores, self._job.run, self._job.reward)
        if count.scored + count.failed > self.scored + self.failed:
            self._verdict_at = time.monotonic()
        self.scored, self.failed, self.reason = count.scored, count.failed, count.reason
        self.total = self.scored + self.failed + count.waiting
        return count.waiting

    def _silent_s(self) -> float:
        return time.monotonic() - self._verdict_at

    def _show(self) -> None:
        line = f"{self}, {self.failed} failed"
        if self._silent_s() > _LINE_EVERY_S:
            line += (
                f"; no value for {self._silent_s():.0f} s. They come from the workers of the queue "
                f"{self._job.queue} through a controller's collector"
            )
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            note(f"{line}.")

    def _timeout(self) -> WaitTimeout:
        reward, queue = self._job.reward, self._job.queue
        return WaitTimeout(
            f"No trajectory was scored for {self._timeout_s:g} s; {self}.",
            why=f"Does a worker with the reward {reward} read the queue {queue}, and does a "
            "controller run?",
            remedy="The values so far are kept. See `rollout ps`, and give the command again.",
        )
