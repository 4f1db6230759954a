"""`rollout worker` with a wrong clock, or with messages sent twice, late and out of order.

The deployment starts it instead of the ordinary one. Must not: change the messages.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import threading
import time
from typing import Any

from benchmarks.faults.sqs_server import shorten_visibility

#: Seconds by which this process's wall clock is ahead (C16).
SKEW_VARIABLE = "FAULTS_CLOCK_SKEW_S"
#: Longest delay of the second copy of a message (C11).
TWICE_VARIABLE = "FAULTS_SAY_TWICE_WITHIN_S"


def skew_clock(skew_s: float) -> None:
    """Shift the wall clock of this process, but not its monotonic clocks."""
    true_time = time.time
    time.time = lambda: true_time() + skew_s
    true_datetime = datetime.datetime

    class SkewedDatetime(true_datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> SkewedDatetime:
            return cls.fromtimestamp(true_time() + skew_s, tz)

        @classmethod
        def utcnow(cls) -> SkewedDatetime:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    datetime.datetime = SkewedDatetime


def send_twice(within_s: float) -> None:
    """Send every message twice: half of them at once and late, the others late."""
    from pipeline.queue.completions import OutcomePublisher

    draw = random.Random(os.getpid())

    lock = threading.Lock()
    others: list[OutcomePublisher] = []

    def late(original: Any, publisher: OutcomePublisher, message: Any) -> None:
        # Not the worker's own publisher, which belongs to one thread.
        with lock:
            if not others:
                others.append(OutcomePublisher(publisher._broker))
            original(others[0], message)

    def doubled(original: Any) -> Any:
        def send(self: OutcomePublisher, message: Any) -> None:
            is_prompt = draw.random() < 0.5
            if is_prompt:
                original(self, message)
            for _ in range(1 if is_prompt else 2):
                delay_s = draw.random() * within_s
                threading.Timer(delay_s, late, (original, self, message)).start()

        return send

    OutcomePublisher.send_completions = doubled(OutcomePublisher.send_completions)
    OutcomePublisher.send_journal = doubled(OutcomePublisher.send_journal)
    OutcomePublisher.send_heartbeat = doubled(OutcomePublisher.send_heartbeat)


def main() -> None:
    shorten_visibility()
    if skew := os.environ.get(SKEW_VARIABLE):
        skew_clock(float(skew))
    if within := os.environ.get(TWICE_VARIABLE):
        send_twice(float(within))
    from rollout.app import main as rollout

    rollout(["worker", *sys.argv[1:]])


if __name__ == "__main__":
    main()
