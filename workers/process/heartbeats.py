"""Heartbeats: what the worker holds, told every few seconds, and whether its loop is alive.

A thread of its own asks the event loop for the list, so a loop that is blocked sends no heartbeat:
its attempts run out of their lease, as they should. New attempts are announced within a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.contract.activity import RunActivity
from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import AttemptBeat, Heartbeat
from pipeline.queue.completions import OutcomePublisher
from workers.process.in_flight import InFlight
from workers.process.loop import LoopThread
from workers.process.rejected_messages import RefusedMessages

log = logging.getLogger(__name__)

#: A loop that does not answer for this long is reported, with the stack it is stuck in.
_BLOCKED_S = 1.0


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """Seconds between heartbeats, and until a new attempt is announced."""

    every_s: float
    announce_s: float


class Heartbeats(threading.Thread):
    """Sends heartbeats until closed.

    Args:
        publisher: A connection of its own.
        loop: The event loop that is watched.
        in_flight: What it executes.
        waiting: Attempts that wait here, before they run or after: for a free place, or for a
            broker that takes their completion.
        activity: What the attempts of each run did so far; asked on the loop.
        refused: Messages that cannot be taken, to be told to the collector.
        worker_id: This process.
        capacity: Attempts it runs at once.
        queues: Where it takes requests from.
        base_urls: Model endpoints it may call besides loopback, without credentials.
        times: How often.
    """

    def __init__(
        self,
        publisher: OutcomePublisher,
        loop: LoopThread,
        in_flight: InFlight,
        *,
        waiting: Callable[[], tuple[AttemptBeat, ...]],
        activity: Callable[[], tuple[RunActivity, ...]] = tuple,
        refused: RefusedMessages | None = None,
        worker_id: str,
        capacity: int,
        queues: tuple[str, ...] = (),
        base_urls: tuple[str, ...] = (),
        times: HeartbeatTimes,
    ) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._publisher = publisher
        self._loop = loop
        self._in_flight = in_flight
        self._waiting = waiting
        self._activity = activity
        self._refused = refused or RefusedMessages()
        self._worker_id = worker_id
        self._capacity = capacity
        self._queues = queues
        self._base_urls = base_urls
        self._times = times
        self._closing = threading.Event()
        self._sequence = 0
        self._due_at = 0.0
        self._lag_s = 0.0
        self.stopping = False

    def run(self) -> None:
        """Tell what is held, again and again."""
        while not self._closing.wait(self._times.announce_s / 2):
            if self._is_due():
                self._beat()
        self._beat(final=True)
        self._publisher.close()

    def close(self) -> None:
        """Send a last, empty heartbeat and end."""
        self._closing.set()
        self.join(timeout=10)

    def _is_due(self) -> bool:
        asked = time.monotonic()
        if asked >= self._due_at:
            return True
        try:
            waited_s = self._loop.call(self._in_flight.oldest_unannounced_s, timeout_s=_BLOCKED_S)
        except TimeoutError:
            self._report_blocked()
            return False
        self._lag_s = time.monotonic() - asked
        return waited_s >= self._times.announce_s

    def _beat(self, *, final: bool = False) -> None:
        try:
            held, activity = self._loop.call(
                lambda: (() if final else self._in_flight.beats(), self._activity()),
                timeout_s=_BLOCKED_S,
            )
        except TimeoutError:
            self._report_blocked()
            if not final:
                return
            held, activity = (), ()
        running = {(beat.rollout_id, beat.attempt_no) for beat in held}
        there = () if final else self._waiting()
        waiting = tuple(b for b in there if (b.rollout_id, b.attempt_no) not in running)
        refused = self._refused.waiting()
        self._sequence += 1
        beat = Heartbeat(
            worker_id=self._worker_id,
            sequence=self._sequence,
            attempts=held + waiting,
            capacity=0 if final else self._capacity,
            loop_lag_ms=round(self._lag_s * 1000, 3),
            stopping=self.stopping or final,
            refused=refused,
            queues=self._queues,
            base_urls=self._base_urls,
            activity=activity,
        )
        try:
            self._publisher.send_heartbeat(beat)
            self._refused.told(len(refused))
        except QueueUnavailable as error:
            log.log(
                logging.WARNING if self._sequence % 10 == 1 else logging.DEBUG,
                "A heartbeat could not be sent: %s",
                error,
            )
        self._due_at = time.monotonic() + self._times.every_s

    def _report_blocked(self) -> None:
        self._lag_s = max(self._lag_s, _BLOCKED_S)
        log.error(
            "The event loop has not answered for %.1f s; all %d attempts of this worker stand "
            "still. Blocking code must run in a thread. It is here:\n%s",
            _BLOCKED_S,
            len(self._in_flight),
            self._loop.where(),
        )
