"""Markers: messages that a collector sends through the workers' queues to all collectors.

Used by the collector to learn how far the queues are read (docs/adr/0034). Must not: use the store,
or let a broker that accepts no messages delay the reading.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import Marker
from pipeline.queue.completions import OutcomePublisher


class MarkerSender:
    """Sends markers in a thread, because publishing may block while reading goes on.

    RabbitMQ blocks publishers and serves consumers while its memory or disk is short.

    Args:
        publisher: A connection that nothing else uses.
    """

    def __init__(self, publisher: OutcomePublisher) -> None:
        self._publisher = publisher
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="markers")
        self._sending: Future[float] | None = None
        self._began_at = 0.0

    @property
    def is_sending(self) -> bool:
        """Whether the broker has not confirmed the last markers yet."""
        return self._sending is not None and not self._sending.done()

    @property
    def delay_s(self) -> float:
        """Seconds that the broker took to confirm the last markers; infinite if it did not."""
        if self._sending is None:
            return 0.0
        return self._sending.result() if self._sending.done() else time.monotonic() - self._began_at

    def send(self, markers: Sequence[Marker]) -> None:
        """Send markers; call it when no others are being sent."""
        self._began_at = time.monotonic()
        self._sending = self._thread.submit(self._send, markers)

    def close(self) -> None:
        """Close the connection; returns at once, also if a marker is still being sent."""
        self._thread.submit(self._publisher.close)
        self._thread.shutdown(wait=False)

    def _send(self, markers: Sequence[Marker]) -> float:
        began_at = time.monotonic()
        try:
            for marker in markers:
                self._publisher.send_marker(marker)
        except QueueUnavailable:
            return math.inf
        return time.monotonic() - began_at
