"""Messages this worker could not take and cannot answer, until the collector was told of them.

Filled by task threads, told with the heartbeats, which keep what could not be sent. They end among
the dead letters. Must not: grow without bound; a flood of forged messages is not worth the memory.
"""

from __future__ import annotations

import threading
from collections import deque

from pipeline.contract.messages import RefusedMessage, storable

_MOST = 50
#: With base64 and the rest of a heartbeat below what SQS takes.
_MOST_CHARS = 2_000


class RefusedMessages:
    """A bounded list; when it is full the oldest are forgotten."""

    def __init__(self) -> None:
        self._waiting: deque[RefusedMessage] = deque(maxlen=_MOST)
        self._lock = threading.Lock()

    def add(self, kind: str, reason: str, raw: str) -> None:
        """Note a message; of a long one its beginning."""
        message = RefusedMessage(kind=kind, reason=reason, raw=storable(raw[:_MOST_CHARS]))
        with self._lock:
            self._waiting.append(message)

    def waiting(self) -> tuple[RefusedMessage, ...]:
        """Return those nobody was told of yet, oldest first."""
        with self._lock:
            return tuple(self._waiting)

    def told(self, count: int) -> None:
        """Forget the oldest: the broker has them."""
        with self._lock:
            for _ in range(min(count, len(self._waiting))):
                self._waiting.popleft()
