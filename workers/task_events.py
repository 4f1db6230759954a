"""Task events for Flower, sent in batches twice a second.

Celery flushes its event buffer on every turn of its loop, which under load means a message for
nearly every event: a third of a worker's cost outside the event loop (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps

_EVERY_S = 0.5
_MOST = 1000


class BatchedTaskEvents(bootsteps.StartStopStep):
    """Replaces the flush on every turn by one every half second."""

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._timer: Any = None
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        """Take over the dispatcher that `Events` has just made; also after a reconnect."""
        if parent.event_dispatcher is None:
            return
        _publish_once(parent.event_dispatcher)
        if parent.hub is None:
            return
        parent.event_dispatcher.buffer_limit = _MOST
        parent.event_dispatcher.on_send_buffered = None
        self._timer = parent.hub.call_repeatedly(_EVERY_S, parent.event_dispatcher.flush)

    def stop(self, parent: Any) -> None:
        """Send what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            parent.event_dispatcher.flush()

    terminate = stop


def _publish_once(dispatcher: Any) -> None:
    """Let a lost connection be an error, upon which Celery reconnects.

    Celery's own heartbeat events ask for retries. Kombu 5.7 then declares the exchange on the dead
    channel again and again: the worker's main loop hung there for ever after RabbitMQ had closed
    the connection of a process that was frozen for a while.
    """
    publish = dispatcher._publish

    def publish_once(event: Any, producer: Any, routing_key: str, **options: Any) -> None:
        publish(event, producer, routing_key, **{**options, "retry": False})

    dispatcher._publish = publish_once
