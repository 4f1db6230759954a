"""What Flower is told of tasks and of this worker, in batches twice a second.

Celery flushes its event buffer on every turn of its loop, which under load means a message for
nearly every event: a third of a worker's cost outside the event loop (docs/performance.md).
Must not: acknowledge, retry or decide anything; events are for people who watch.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from celery import bootsteps
from celery.utils.sysinfo import load_average
from celery.worker.state import SOFTWARE_INFO, active_requests, all_total_count

from workers.process.acknowledgements import GatedRequest

_EVERY_S = 0.5
_MOST = 1000
#: Celery's own time between two heartbeat events; Flower calls a worker offline after twice that.
_HEARTBEAT_S = 2.0
#: Longest wait for a broker to take the last events: a worker that stops must not hang on them.
_LAST_WORDS_S = 5.0


#: How the task that this thread runs ends: an event of Celery's and the text beside it.
_this_thread = threading.local()


def end_as(event: str | None, text: str) -> str:
    """Let the running task end in Flower by this event, not as a success; return the text.

    Nothing is raised: an exception of a task costs Celery 0.9 ms (traceback, pickling, logging), a
    value that is returned 0.02 ms.

    Args:
        event: Celery's event, such as `task-failed`; None sends none.
        text: What the page shows beside it.
    """
    _this_thread.end = (event, text)
    return text


class ReportedRequest(GatedRequest):
    """A request whose task may say by `end_as` how its end is reported."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Forget how the task before ended; called in the thread that then runs this one."""
        _this_thread.end = None
        super().on_accepted(pid, time_accepted)

    def send_event(self, type: str, **fields: Any) -> None:
        """Send an event; the end that the task asked for takes the place of a success."""
        end = getattr(_this_thread, "end", None)
        if type != "task-succeeded" or end is None:
            super().send_event(type, **fields)
            return
        event, text = end
        if event is not None:
            super().send_event(event, exception=text, runtime=fields.get("runtime"))


class BatchedTaskEvents(bootsteps.StartStopStep):
    """Replaces the flush on every turn by one every half second, until the last task has ended."""

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._timer: Any = None
        self._drain: DrainEvents | None = None
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
        """Send what is left; at the end of the worker, a thread goes on with what still runs."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        parent.event_dispatcher.flush()
        if parent.blueprint.state != bootsteps.RUN:
            self._drain = DrainEvents(parent.event_dispatcher)

    terminate = stop

    def shutdown(self, parent: Any) -> None:
        """Send the last events; the pool has ended by now, the connection has not."""
        if self._drain is not None:
            self._drain.end()
            self._drain = None


class DrainEvents:
    """Sends events while a worker drains, when Celery's loop has ended, and the last ones.

    Without it the tasks that finish after SIGTERM would stay "started" in Flower for ever, and the
    worker's number of active tasks as it was at the signal.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drain-events", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say that nothing runs any more, and wait until Flower has been told."""
        self._is_over.set()
        self._thread.join(_LAST_WORDS_S)

    def _run(self) -> None:
        # Celery has just said "offline", which is not so yet.
        heartbeat_due_at = 0.0
        while not self._is_over.wait(_EVERY_S):
            if time.monotonic() >= heartbeat_due_at:
                self._tell("worker-heartbeat")
                heartbeat_due_at = time.monotonic() + _HEARTBEAT_S
            self._dispatcher.flush()
        self._dispatcher.flush()
        # Flower's metrics take the number of active tasks from heartbeats only.
        self._tell("worker-heartbeat")
        self._tell("worker-offline")

    def _tell(self, event: str) -> None:
        self._dispatcher.send(
            event,
            freq=_HEARTBEAT_S,
            active=len(active_requests),
            processed=all_total_count[0],
            loadavg=load_average(),
            **SOFTWARE_INFO,
        )


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
