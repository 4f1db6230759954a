"""`rollout controller` that dies between two steps, or publishes requests twice.

The deployment starts it instead of the ordinary one. It patches the functions by which the services
commit, acknowledge and publish; the product has no code for it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.faults.sqs_server import shorten_visibility

#: `PLACE:N`: die when this place is reached for the n-th time.
DIE_VARIABLE = "FAULTS_DIE_AT"

#: Longest delay of the second copy of a request, in seconds (C11).
TWICE_VARIABLE = "FAULTS_ASK_TWICE_WITHIN_S"

#: Between the commit of outcomes and their acknowledgement (C7).
BEFORE_ACK = "before_ack"
#: After outcomes are written, before the transaction commits (C8).
BEFORE_COMMIT = "before_commit"
#: Between the commit of attempts and their publication (C9).
BEFORE_PUBLISH = "before_publish"
#: After half of a batch is published (C9).
HALF_PUBLISHED = "half_published"


def die() -> None:
    """End by SIGKILL: nothing is flushed or closed."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(place: str, nth: int) -> None:
    """Make this process die at a place."""
    reached = 0

    def is_due() -> bool:
        nonlocal reached
        reached += 1
        return reached == nth

    _SEAMS[place](is_due)


def publish_twice(within_s: float) -> None:
    """Publish every batch of requests in random order, and once more a little later."""
    from pipeline.queue.requests import RequestPublisher

    publish = RequestPublisher.publish
    draw = random.Random(os.getpid())

    def doubled(self: RequestPublisher, requests: Any, *, queue: str) -> Any:
        shuffled = draw.sample(requests, len(requests))
        left_out = publish(self, shuffled, queue=queue)
        delay_s = draw.random() * within_s
        threading.Timer(delay_s, publish, (self, requests), {"queue": queue}).start()
        return left_out

    RequestPublisher.publish = doubled


def _arm_before_ack(is_due: Callable[[], bool]) -> None:
    from pipeline.queue.completions import Delivery, OutcomeConsumer

    ack = OutcomeConsumer.ack

    def patched(self: OutcomeConsumer, delivery: Delivery) -> None:
        if delivery.completions and is_due():
            die()
        ack(self, delivery)

    OutcomeConsumer.ack = patched


def _arm_before_commit(is_due: Callable[[], bool]) -> None:
    from pipeline import collector

    record: Any = collector.record_outcomes

    def patched(connection: Any, completions: Any) -> Any:
        report = record(connection, completions)
        if completions and is_due():
            die()
        return report

    collector.record_outcomes = patched


def _arm_publish(is_due: Callable[[], bool], *, share: float) -> None:
    from pipeline.queue.requests import RequestPublisher

    publish = RequestPublisher.publish

    def patched(self: RequestPublisher, requests: Any, *, queue: str) -> Any:
        if is_due():
            if first := requests[: int(share * len(requests))]:
                publish(self, first, queue=queue)
            die()
        return publish(self, requests, queue=queue)

    RequestPublisher.publish = patched


_SEAMS = {
    BEFORE_ACK: _arm_before_ack,
    BEFORE_COMMIT: _arm_before_commit,
    BEFORE_PUBLISH: partial(_arm_publish, share=0.0),
    HALF_PUBLISHED: partial(_arm_publish, share=0.5),
}


def main() -> None:
    shorten_visibility()
    if armed := os.environ.get(DIE_VARIABLE):
        place, _, nth = armed.partition(":")
        arm(place, int(nth))
    if within := os.environ.get(TWICE_VARIABLE):
        publish_twice(float(within))
    from rollout.app import main as rollout

    rollout(["controller", *sys.argv[1:]])


if __name__ == "__main__":
    main()
