"""Changes to Celery: acknowledgements, the ends of tasks, prefetching, and events for Flower.

`worker.py` adds the steps to Celery's consumer, and the tasks use `WorkerRequest`. Must not: decide
about attempts or retries.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from celery import bootsteps
from celery.utils.sysinfo import load_average
from celery.worker.request import Request
from celery.worker.state import (
    SOFTWARE_INFO,
    active_requests,
    all_total_count,
    reserved_requests,
    task_ready,
)
from kombu.common import ignore_errors

#: RabbitMQ: most requests that a worker receives before it has acknowledged the first of them.
_MAX_PREFETCH = 32
_FLUSH_INTERVAL_S = 0.5
_BUFFER_LIMIT = 1000
#: Celery's own time between two heartbeat events; Flower calls a worker offline after twice that.
_HEARTBEAT_S = 2.0
#: Longest wait for the broker to take the last events of a stopping worker.
_LAST_EVENTS_S = 5.0

#: Held while a request is accepted, and while the connection is declared to be closing.
_accept_lock = threading.Lock()
_is_closing = threading.Event()
#: Types and fields of events that are not sent yet; without a connection only the newest are kept.
#: One thread sends them: an event that is added to Celery's own buffer while another thread sends
#: that buffer would be lost.
_events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=20_000)


class TaskEnd(NamedTuple):
    """The value that a task returns: text and type of its last event, which Flower shows.

    A task returns an error instead of raising it: an exception costs Celery 0.9 ms (traceback,
    pickling, logging).
    """

    text: str
    event: str | None = "task-succeeded"  #: None sends none.


class WorkerRequest(Request):
    """A request that is acknowledged and executed, or neither."""

    #: Whether the request stays unacknowledged, so that the broker delivers it to another worker.
    is_left = False

    @property
    def earlier_deliveries(self) -> int:
        """How often the broker delivered this request before, as far as the broker reports.

        One reason is a worker that died before its acknowledgement. Quorum queues and SQS count
        deliveries; Redis only marks a request as redelivered.
        """
        return self.request_dict.get("x-delivery-count") or int(
            bool(self.delivery_info.get("redelivered"))
        )

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Acknowledge, unless the connection ends."""
        with _accept_lock:
            self.is_left = _is_closing.is_set()
            if not self.is_left:
                self.acknowledge()
        if not self.is_left:
            super().on_accepted(pid, time_accepted)

    def finish(self, end: TaskEnd, runtime_s: float) -> None:
        """Note the end of the task, and send its last event."""
        task_ready(self)
        if end.event is not None:
            field = "result" if end.event == "task-succeeded" else "exception"
            self.send_event(end.event, **{field: end.text}, runtime=runtime_s)

    def send_event(self, type: str, **fields: Any) -> None:
        """Send an event with the next ones; never blocks."""
        if self.task.send_events:
            _events.append((type, {"uuid": self.id, "timestamp": time.time(), **fields}))


def _send_events(dispatcher: Any) -> None:
    """Send the events of tasks, with those that Celery itself added."""
    while _events:
        event, fields = _events.popleft()
        dispatcher.send(event, **fields)
    dispatcher.flush()


class ReserveFreePlaces(bootsteps.StartStopStep):
    """Reserves hardly more requests than can start at once, as `worker_disable_prefetch` does.

    That setting is for Redis alone. A full worker's reserved requests reach no other worker.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Tell SQS the free places, RabbitMQ a number; called again after a reconnect."""
        consumer, places = parent.task_consumer, parent.pool.num_processes
        if hasattr(consumer.channel, "free_places"):
            consumer.channel.free_places = lambda: places - len(reserved_requests)
        elif parent.connection.transport.driver_type == "amqp":
            # Started requests are acknowledged at once, so this bounds those that wait.
            consumer.qos(prefetch_count=max(1, min(_MAX_PREFETCH, places // 8)))


class LastAcknowledgements(bootsteps.StartStopStep):
    """Stops before the consumer of tasks does, and before its connection closes.

    Celery acknowledges a message on the next turn of its loop, after the task has started. If the
    loop ended before that, the broker would deliver the message again while this worker runs it.
    Celery also keeps its channel until the last task has ended. Requests that RabbitMQ had
    delivered to a full worker would wait there for as long as the worker drains.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Let tasks start; called again after a reconnect."""
        _is_closing.clear()

    def stop(self, parent: Any) -> None:
        """Let no further task start, acknowledge the started ones, return the waiting ones."""
        start_no_more()
        if parent.hub is None:
            return
        for pending in parent.hub._pop_ready():
            try:
                pending()
            except OSError:
                # The connection is lost, so the broker delivers these messages again.
                continue
        flush = getattr(parent.task_consumer.channel, "flush_acknowledgements", None)
        if flush is not None:
            flush()
        if parent.connection.transport.driver_type == "amqp":
            ignore_errors(parent, lambda: _return_waiting(parent.task_consumer))

    terminate = stop


def start_no_more() -> None:
    """Let no further task start: its request goes back to the broker, not yet acknowledged."""
    with _accept_lock:
        _is_closing.set()


def _return_waiting(consumer: Any) -> None:
    """Return to RabbitMQ all requests that have not started; the others are acknowledged."""
    consumer.cancel()  # otherwise the broker would deliver them to this worker again
    consumer.recover(requeue=True)
    for request in list(reserved_requests):
        if not request.acknowledged:
            task_ready(request)  # heartbeats must not renew its lease any more


class BatchedTaskEvents(bootsteps.StartStopStep):
    """Flushes events every half second, until the last task has ended.

    Celery flushes its event buffer on every turn of its loop. Under load that is nearly one message
    per event, a third of a worker's cost outside the event loop (docs/performance.md).
    """

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._timer: Any = None
        self._drain: DrainEvents | None = None
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        """Take over the dispatcher that `Events` has just made; called again after a reconnect."""
        if parent.event_dispatcher is None:
            return
        _publish_once(parent.event_dispatcher)
        if parent.hub is None:
            return
        parent.event_dispatcher.buffer_limit = _BUFFER_LIMIT
        parent.event_dispatcher.on_send_buffered = None
        dispatcher = parent.event_dispatcher
        self._timer = parent.hub.call_repeatedly(
            _FLUSH_INTERVAL_S, lambda: _send_events(dispatcher)
        )

    def stop(self, parent: Any) -> None:
        """Flush; if the worker ends, a thread continues until its last task has ended."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        _send_events(parent.event_dispatcher)
        if parent.blueprint.state != bootsteps.RUN:
            self._drain = DrainEvents(parent.event_dispatcher)

    terminate = stop

    def shutdown(self, parent: Any) -> None:
        """Send the last events; the pool has ended by now, the connection has not."""
        if self._drain is not None:
            self._drain.end()
            self._drain = None


class DrainEvents:
    """Sends events while a worker drains and Celery's loop has already ended.

    Otherwise tasks that finish after SIGTERM would stay "started" in Flower for ever, and the
    worker's number of active tasks would stay as at the signal.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drain-events", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Declare that all tasks have ended, and wait until the last events are sent."""
        self._is_over.set()
        self._thread.join(_LAST_EVENTS_S)

    def _run(self) -> None:
        # Celery has just sent "worker-offline", too early: a heartbeat at once corrects that.
        heartbeat_due_at = 0.0
        while not self._is_over.wait(_FLUSH_INTERVAL_S):
            if time.monotonic() >= heartbeat_due_at:
                self._send("worker-heartbeat")
                heartbeat_due_at = time.monotonic() + _HEARTBEAT_S
            _send_events(self._dispatcher)
        _send_events(self._dispatcher)
        # Flower's metrics read the number of active tasks from heartbeats only.
        self._send("worker-heartbeat")
        self._send("worker-offline")

    def _send(self, event: str) -> None:
        self._dispatcher.send(
            event,
            freq=_HEARTBEAT_S,
            active=len(active_requests),
            processed=all_total_count[0],
            loadavg=load_average(),
            **SOFTWARE_INFO,
        )


def _publish_once(dispatcher: Any) -> None:
    """Raise an error when the connection is lost, so that Celery reconnects.

    Celery's own heartbeat events ask for retries. Kombu 5.7 then declares the exchange on the dead
    channel without end: the worker's main loop hung there after RabbitMQ had closed the connection
    of a process that was frozen for a while.
    """
    publish = dispatcher._publish

    def publish_once(event: Any, producer: Any, routing_key: str, **options: Any) -> None:
        publish(event, producer, routing_key, **{**options, "retry": False})

    dispatcher._publish = publish_once
