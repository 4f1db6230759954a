"""Sends the items of a thread's queue in few messages, and tries again while the broker is away.

The outbox, its journal frames and a gateway's recorded calls use it, each in the thread that owns
the connection. Must not: decide the fate of an item that was not sent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from pipeline.contract.errors import ServiceUnavailable
from pipeline.queue.completions import FrameTooLong

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Size of the bodies in a message. The publisher measures the whole message.
_MOST_BYTES = 180_000
_MAX_BACKOFF_S = 5.0
#: Longest wait for a publisher whose broker stopped answering, after the time to give up.
_LAST_TRY_S = 30.0


class SendRetries:
    """The tries of one thread; without an end until another thread calls `give_up_after`."""

    def __init__(self) -> None:
        self._give_up_at = math.inf

    def give_up_after(self, timeout_s: float) -> None:
        """From then on try each message once."""
        self._give_up_at = time.monotonic() + timeout_s

    def longest_end_s(self) -> float:
        """Return the longest time that the thread needs to try the remaining messages."""
        return max(0.0, self._give_up_at - time.monotonic()) + _LAST_TRY_S

    def wait(self, failures: int, text: str, error: Exception) -> bool:
        """Wait before the next try, longer after each failure; False: it is time to give up.

        Args:
            failures: Failures in a row; the first of every ten is logged.
            text: The items that wait, for the log line.
            error: The last failure.
        """
        if time.monotonic() > self._give_up_at:
            return False
        if failures % 10 == 1:
            log.warning("%s: %s", text, error)
        time.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))
        return True

    def send(
        self,
        items: Sequence[T],
        publish: Callable[[Sequence[T]], None],
        *,
        shorten: Callable[[T, FrameTooLong], T | None],
        describe: Callable[[int], str],
        repair: Callable[[Sequence[T]], Sequence[T]] | None = None,
    ) -> list[tuple[T, Exception]]:
        """Send items as one message, or as several where one is too long.

        Args:
            items: In order.
            publish: Sends items as one message.
            shorten: Returns an item that is too long by itself in fewer bytes; None if it cannot.
            describe: Returns the log line about a number of items that wait.
            repair: Returns the items without those that cause an unexpected error; None: such an
                error is raised.

        Returns:
            The items that were not sent, each with its error.
        """
        parts, failures = [items], 0
        unsent: list[tuple[T, Exception]] = []
        while parts:
            part = parts.pop()
            try:
                publish(part)
                failures = 0
            except FrameTooLong as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += part[middle:], part[:middle]
                elif (shorter := shorten(part[0], error)) is not None:
                    parts.append([shorter])
                else:
                    unsent.append((part[0], error))
            # Broad on purpose: if the outbox's thread ended, heartbeats would renew its attempts
            # for ever.
            except Exception as error:
                if not isinstance(error, ServiceUnavailable):
                    if repair is None:
                        raise
                    part = repair(part)
                failures += 1
                if not self.wait(failures, describe(len(part)), error):
                    unsent += [(item, error) for item in part]
                elif part:
                    parts.append(part)
        return unsent


def parts_of(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items that fit into one message together, in order."""
    part: list[T] = []
    size = 0
    for item in items:
        if part and size + size_of(item) > _MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += size_of(item)
    if part:
        yield part
