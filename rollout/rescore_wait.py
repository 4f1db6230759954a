"""Waiting for the verdicts on stored trajectories that are scored again, with progress.

Used by `rescore.py`. The collector notifies what it committed; where a notification was lost with
its connection, the store says which have a value. Must not: publish anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from pipeline.contract.errors import WaitTimeout
from pipeline.store.engine import RESCORED_CHANNEL, Listener, transact
from pipeline.store.rescores import NAME_CHARS, Verdicts, find_scored
from rollout.output import console, note

if TYPE_CHECKING:
    from rich.status import Status
    from sqlalchemy import Engine

    from pipeline.contract.messages import RescoreRequest

_LOOK_S = 0.5
_LINE_EVERY_S = 10.0


class RescoreWait:
    """Counts verdicts until none is missing."""

    def __init__(
        self, engine: Engine, reward: str, total: int, *, queue: str, timeout_s: float
    ) -> None:
        """Make a wait.

        Args:
            engine: The trajectory store.
            reward: Whose verdicts.
            total: How many are expected, for the progress.
            queue: Where the requests lie, for the explanation of a wait.
            timeout_s: Longest time without any verdict.
        """
        self.total = total
        self.scored = 0
        self.failed = 0
        self.reason: str | None = None  #: why the first of the failed ones has no value
        self._engine = engine
        self._reward = reward
        self._queue = queue
        self._timeout_s = timeout_s
        self._pending: set[UUID] = set()
        self._listener = Listener(engine, RESCORED_CHANNEL)
        self._check: Callable[[], None] = lambda: None
        self._news_at = self._line_at = time.monotonic()
        self._display: Status | None = None

    def __str__(self) -> str:
        return f"{self.scored} of {self.total} trajectories were scored"

    @contextmanager
    def watched(self, check: Callable[[], None]) -> Iterator[None]:
        """Listen and show progress inside; all that is published comes after its beginning.

        Args:
            check: Called about twice a second; raises where waiting is of no use any more.
        """
        self._check = check
        try:
            self._listener.hear(0)
            with ExitStack() as stack:
                if sys.stderr.isatty():
                    self._display = stack.enter_context(console(sys.stderr).status(str(self)))
                yield
        finally:
            self._display = None
            self._listener.close()

    def expect(self, requests: Iterable[RescoreRequest]) -> None:
        """Count verdicts on these from now on; called before they are published."""
        self._pending |= {request.rollout_id for request in requests}

    def refuse(self, requests: Iterable[RescoreRequest]) -> None:
        """Count requests as failed that are too large for the broker."""
        refused = [request.rollout_id for request in requests]
        self._take(Verdicts(self._reward[:NAME_CHARS], [], refused, "its prompt is too large"))

    def wait(self, most: int = 0) -> None:
        """Wait until at most `most` verdicts are missing.

        Raises:
            WaitTimeout: None came for too long.
        """
        while len(self._pending) > most:
            heard = self._listener.hear(_LOOK_S)
            if heard is None:
                self._catch_up()
            for payload in heard or ():
                self._take(Verdicts.read(payload))
            self._check()
            self._show()
            if self._is_over():
                self._catch_up()
            if self._is_over() and self._pending:
                raise self._timeout()

    def _take(self, verdicts: Verdicts) -> None:
        if verdicts.reward != self._reward[:NAME_CHARS]:
            return
        # At-least-once: a verdict that was heard already is pending no more.
        scored = self._pending.intersection(verdicts.scored)
        failed = self._pending.intersection(verdicts.failed)
        self._pending -= scored | failed
        self.scored += len(scored)
        self.failed += len(failed)
        if failed:
            self.reason = self.reason or verdicts.reason
        if scored or failed:
            self._news_at = time.monotonic()

    def _catch_up(self) -> None:
        found = transact(self._engine, lambda c: find_scored(c, self._pending, self._reward))
        self._take(Verdicts(self._reward[:NAME_CHARS], list(found), [], None))

    def _show(self) -> None:
        silent_s = time.monotonic() - self._news_at
        line = f"{self}, {self.failed} failed"
        if silent_s > _LINE_EVERY_S:
            line += (
                f"; no value for {silent_s:.0f} s. They come from the workers of the queue "
                f"{self._queue} through a controller's collector"
            )
        if self._display is not None:
            self._display.update(line)
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            note(f"{line}.")

    def _is_over(self) -> bool:
        return time.monotonic() - self._news_at >= self._timeout_s

    def _timeout(self) -> WaitTimeout:
        return WaitTimeout(
            f"No trajectory was scored for {self._timeout_s:g} s; {self}.",
            why=f"Does a worker with the reward {self._reward} read the queue {self._queue}, and "
            "does a controller run?",
            remedy="The values so far are kept. See `rollout ps`, and give the command again.",
        )
