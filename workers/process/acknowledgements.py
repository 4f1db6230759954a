"""Acknowledgements around the end of a connection, so that nothing is executed twice or not at all.

Celery acknowledges a message on the next turn of its loop, after the task has started. When the
loop ends first, the broker gives the message to another worker while this one runs it. So when the
connection closes, what has started is acknowledged, and nothing starts that could not be. Must not:
acknowledge what has not started.
"""

from __future__ import annotations

import threading
from typing import Any

from celery import bootsteps
from celery.worker.request import Request

#: One at a time: a request is accepted, or the end of acknowledgements is declared.
_gate = threading.Lock()
_too_late = threading.Event()
_this_thread = threading.local()


def is_left_to_another() -> bool:
    """Whether the request whose task this thread runs was not acknowledged: it comes again."""
    return getattr(_this_thread, "is_left", False)


class GatedRequest(Request):
    """A request that is acknowledged and executed, or neither."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Acknowledge, unless it is too late; called in the thread that then runs the task."""
        with _gate:
            _this_thread.is_left = _too_late.is_set()
            if not _this_thread.is_left:
                self.acknowledge()
        if not _this_thread.is_left:
            super().on_accepted(pid, time_accepted)


class LastAcknowledgements(bootsteps.StartStopStep):
    """Stops before the consumer of tasks does, and before its connection closes."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Let tasks start; also after a reconnect."""
        _too_late.clear()

    def stop(self, parent: Any) -> None:
        """Let no task start any more, then acknowledge those that did."""
        with _gate:
            _too_late.set()
        if parent.hub is None:
            return
        for pending in parent.hub._pop_ready():
            try:
                pending()
            except OSError:
                # The connection is gone: the broker delivers these again.
                continue

    terminate = stop
