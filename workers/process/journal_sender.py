"""Makes and sends frames of journals; the outbox calls it before it sends completions.

A journal only saves work. So a frame that cannot be made or sent is dropped, and its calls are
repeated if the attempt is lost. While the broker is away frames wait, as completions do. Must not:
keep completions from being sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import JournalFrame
from pipeline.queue.completions import FrameTooLong, OutcomePublisher
from pipeline.queue.journal_frames import check_out_frame
from pipeline.queue.payloads import PayloadStore
from workers.process.journal import MakeFrame

log = logging.getLogger(__name__)

#: Size of the bodies in a message; the publisher measures the whole message.
_MOST_BYTES = 180_000
_MAX_BACKOFF_S = 5.0


class JournalSender:
    """Sends frames of journals over the outbox's connection.

    Args:
        publisher: The outbox's.
        payloads: The store that large bodies are written to before their message is sent.
        inline_max_bytes: Largest body that travels in a message; -1 sends none.
    """

    def __init__(
        self, publisher: OutcomePublisher, payloads: PayloadStore, *, inline_max_bytes: int
    ) -> None:
        self._publisher = publisher
        self._payloads = payloads
        self._inline_max_bytes = inline_max_bytes

    def send(self, makers: Iterable[MakeFrame], *, give_up_at: Callable[[], float]) -> None:
        """Make frames and send them.

        Args:
            makers: In order.
            give_up_at: The monotonic time after which nothing waits for the broker any more.
        """
        for part in _parts(self._made(makers)):
            self._send(part, give_up_at)

    def _made(self, makers: Iterable[MakeFrame]) -> Iterator[JournalFrame]:
        for make in makers:
            # Broad on purpose: a frame that cannot be made must not end the outbox.
            try:
                frame = make()
                if frame is not None and len(frame.body) > self._inline_max_bytes:
                    frame = check_out_frame(frame, self._payloads)
            except Exception as error:
                log.warning("A frame of a journal is dropped: %s", error)
                continue
            if frame is not None:
                yield frame

    def _send(self, part: Sequence[JournalFrame], give_up_at: Callable[[], float]) -> None:
        failures = 0
        while part:
            try:
                return self._publisher.send_journal(part)
            except FrameTooLong as error:
                if len(part) == 1:
                    log.warning("A frame of the journal of %s is dropped: %s", part[0].label, error)
                    return None
                self._send(part[: len(part) // 2], give_up_at)
                part = part[len(part) // 2 :]
            except QueueUnavailable as error:
                failures += 1
                if time.monotonic() > give_up_at():
                    return None
                if failures % 10 == 1:
                    log.warning("%d frames of journals wait for the broker: %s", len(part), error)
                time.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))
        return None


def _parts(frames: Iterable[JournalFrame]) -> Iterator[list[JournalFrame]]:
    """Yield frames that fit into one message together."""
    part: list[JournalFrame] = []
    size = 0
    for frame in frames:
        if part and size + len(frame.body) > _MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(frame)
        size += len(frame.body)
    if part:
        yield part
