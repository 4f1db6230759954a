"""The last acknowledgements before a connection closes, so that nothing is executed twice.

Celery acknowledges a message on the next turn of its loop, after the task has started. When the
loop ends first, the broker gives the message to another worker while this one runs it. Must not:
acknowledge what has not started.
"""

from __future__ import annotations

import threading
from typing import Any

from celery import bootsteps

#: Set while there is no connection on which a task that starts now could be acknowledged.
too_late = threading.Event()


class LastAcknowledgements(bootsteps.StartStopStep):
    """Stops before the consumer of tasks does, and before its connection closes."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Let tasks start; also after a reconnect."""
        too_late.clear()

    def stop(self, parent: Any) -> None:
        """Let no task start any more, then acknowledge those that did."""
        too_late.set()
        if parent.hub is None:
            return
        for pending in parent.hub._pop_ready():
            try:
                pending()
            except OSError:
                # The connection is gone: the broker delivers these again.
                continue

    terminate = stop
