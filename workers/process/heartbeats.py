"""Heartbeats: the attempts that this worker holds and the lag of its event loop, every few seconds.

A thread calls the event loop for the list. So a blocked loop sends no heartbeat, and the leases of
its attempts end, as intended. New attempts are announced after `announce_s`. Rejected messages
travel in heartbeats to the collector, which keeps them as dead letters. Must not: touch an attempt
outside the event loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from pipeline.contract.activity import RunActivity
from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import AttemptBeat, Heartbeat, RejectedMessage, storable
from pipeline.queue.completions import OutcomePublisher
from workers.process.in_flight import InFlight
from workers.process.loop import LoopThread
from workers.process.vital_threads import vital

log = logging.getLogger(__name__)

#: A loop that does not respond for this long is logged, with the stack that blocks it.
_BLOCKED_S = 1.0
#: Rejected messages kept; forged ones must not fill the memory.
_MOST_REJECTED = 50
#: Length of a rejected message that keeps the heartbeat, in base64, below the limit of SQS.
_MOST_REJECTED_CHARS = 2_000


class RejectedMessages:
    """Messages that this worker rejected and cannot answer; the oldest are dropped when it is full.

    Filled by the tasks, emptied after a heartbeat was sent.
    """

    def __init__(self) -> None:
        self._waiting: deque[RejectedMessage] = deque(maxlen=_MOST_REJECTED)
        self._lock = threading.Lock()

    def add(self, reason: str, raw: str) -> None:
        """Keep a request, or the beginning of a long one."""
        raw = storable(raw[:_MOST_REJECTED_CHARS])
        with self._lock:
            self._waiting.append(RejectedMessage(kind="request", reason=reason, raw=raw))

    def waiting(self) -> tuple[RejectedMessage, ...]:
        """Return those that were not sent yet, oldest first."""
        with self._lock:
            return tuple(self._waiting)

    def forget(self, count: int) -> None:
        """Drop the oldest messages, after a heartbeat with them was sent."""
        with self._lock:
            for _ in range(min(count, len(self._waiting))):
                self._waiting.popleft()


class Heartbeats(threading.Thread):
    """Sends heartbeats until closed.

    Args:
        publisher: A connection of its own.
        loop: The event loop that is watched.
        in_flight: The attempts that the loop executes.
        template: A heartbeat with the fields that do not change, such as the worker's id.
        waiting: Attempts that are reserved, or whose completion could not be sent yet.
        activity: The activity of each run; called on the loop.
        rejected: Messages to report to the collector.
        every_s: Time between two heartbeats.
        announce_s: Time after which a new attempt is announced without waiting for `every_s`.
    """

    def __init__(
        self,
        publisher: OutcomePublisher,
        loop: LoopThread,
        in_flight: InFlight,
        *,
        template: Heartbeat,
        waiting: Callable[[], tuple[AttemptBeat, ...]],
        activity: Callable[[], tuple[RunActivity, ...]],
        rejected: RejectedMessages,
        every_s: float,
        announce_s: float,
    ) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._publisher = publisher
        self._loop = loop
        self._in_flight = in_flight
        self._template = template
        self._waiting = waiting
        self._activity = activity
        self._rejected = rejected
        self._every_s = every_s
        self._announce_s = announce_s
        self._closing = threading.Event()
        self._sequence = 0
        self._due_at = 0.0
        self._lag_s = 0.0
        self.stopping = False

    def run(self) -> None:
        """Send heartbeats when they are due."""
        with vital(self.name):
            self._run()

    def close(self) -> None:
        """Send a last, empty heartbeat and end."""
        self._closing.set()
        self.join(timeout=10)

    def _run(self) -> None:
        while not self._closing.wait(self._announce_s / 2):
            if self._is_due():
                self._send()
        self._send(final=True)
        self._publisher.close()

    def _is_due(self) -> bool:
        asked_at = time.monotonic()
        if asked_at >= self._due_at:
            return True
        try:
            waited_s = self._loop.call(self._in_flight.oldest_unannounced_s, timeout_s=_BLOCKED_S)
        except TimeoutError:
            self._report_blocked()
            return False
        self._lag_s = time.monotonic() - asked_at
        return waited_s >= self._announce_s

    def _send(self, *, final: bool = False) -> None:
        try:
            running, activity = self._loop.call(
                lambda: (() if final else self._in_flight.beats(), self._activity()),
                timeout_s=_BLOCKED_S,
            )
        except TimeoutError:
            self._report_blocked()
            if not final:
                return
            running, activity = (), ()
        keys = {attempt.key for attempt in running}
        waiting = () if final else self._waiting()
        rejected = self._rejected.waiting()
        self._sequence += 1
        changes = {
            "sequence": self._sequence,
            "attempts": running + tuple(each for each in waiting if each.key not in keys),
            "loop_lag_ms": round(self._lag_s * 1000, 3),
            "stopping": self.stopping or final,
            "refused": rejected,
            "activity": activity,
        }
        if final:
            changes["capacity"] = 0
        try:
            self._publisher.send_heartbeat(self._template.model_copy(update=changes))
            self._rejected.forget(len(rejected))
        except QueueUnavailable as error:
            log.log(
                logging.WARNING if self._sequence % 10 == 1 else logging.DEBUG,
                "A heartbeat could not be sent: %s",
                error,
            )
        self._due_at = time.monotonic() + self._every_s

    def _report_blocked(self) -> None:
        self._lag_s = max(self._lag_s, _BLOCKED_S)
        log.error(
            "The event loop has not answered for %.1f s, so all %d attempts of this worker wait. "
            "Blocking code must run in a thread. The current stack of the loop:\n%s",
            _BLOCKED_S,
            len(self._in_flight),
            self._loop.current_stack(),
        )
