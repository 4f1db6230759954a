"""Kombu's transport for SQS with what the pipeline needs beyond it.

`broker.py` names it for every connection to SQS. A worker receives no more requests than it has
free places, and polling continues after an error. Must not: know messages of the pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kombu.transport import SQS
from vine import promise

log = logging.getLogger(__name__)


class Channel(SQS.Channel):
    """A channel to SQS."""

    #: Returns how many more messages the consumer can start now; None: the prefetch count decides.
    #: A message that waited in a full worker would be delivered to another one as well, after the
    #: visibility timeout.
    free_places: Callable[[], int] | None = None
    hub: Any  #: the event loop of a Celery worker, None elsewhere

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Messages that each unanswered poll may bring.
        self._asked: dict[str, int] = {}

    def _schedule_queue(self, queue: str) -> None:
        """Poll a queue once, unless there is no place for a message; then schedule the next poll.

        This replaces kombu's polling. There, the queues of a channel are polled at the same time
        for the same places, and an error ends the polling of a queue for ever.
        """
        if queue not in self._active_queues:
            return
        most = self._most_wanted()
        if not most:
            self._poll_later(queue)
            return
        self._asked[queue] = most
        name, url = self.canonical_queue_name(queue), self._new_queue(queue)
        self._get_from_sqs(
            name,
            url,
            self.asynsqs(queue=name),
            count=most,
            callback=promise(self._on_answer, (queue, url), on_error=self._on_poll_error),
        )

    def _most_wanted(self) -> int:
        if not self.qos.can_consume():
            return 0
        most = self._get_message_estimate()
        if self.free_places is not None:
            most = min(most, self.free_places() - sum(self._asked.values()))
        return max(most, 0)

    def _on_answer(self, queue: str, url: str, answer: Any) -> None:
        self._asked.pop(queue, None)
        # Kombu turns a server error and a timeout into an empty list.
        if answer and self._on_messages_ready(url, queue, answer):
            self.hub.call_soon(self._schedule_queue, queue)
        else:
            self._poll_later(queue)

    def _on_poll_error(self, queue: str, url: str, error: BaseException) -> None:
        self._asked.pop(queue, None)
        log.warning("Queue %s could not be polled: %s", queue, error)
        self._poll_later(queue)

    def _poll_later(self, queue: str) -> None:
        self.hub.call_later(self.connection.polling_interval, self._schedule_queue, queue)


class Transport(SQS.Transport):
    """The transport of kombu, with this channel."""

    Channel = Channel
