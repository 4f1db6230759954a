"""The loop that every service runs in: one step after the other, also after an error.

Used by the controller for dispatcher, collector and reconciler. A service whose database or broker
is down logs that, waits, and tries again; the loop never ends because of an error.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import uuid
from typing import Protocol

from pipeline.contract.errors import PipelineError

log = logging.getLogger(__name__)

_MAX_BACKOFF_S = 5.0


class Service(Protocol):
    """A service of the controller; works in steps."""

    name: str

    def step(self) -> None:
        """Do one round of work, waiting a bounded time for it."""
        ...

    def close(self) -> None:
        """Close the connections; the service may not be used afterwards."""
        ...


def run_service(service: Service, stop: threading.Event) -> None:
    """Run a service until `stop` is set; returns after the step under way."""
    failures = 0
    while not stop.is_set():
        try:
            service.step()
            if failures:
                log.info("%s works again.", service.name)
            failures = 0
            continue
        except PipelineError as error:
            log.log(
                logging.WARNING if failures % 10 == 0 else logging.DEBUG,
                "%s waits: %s %s",
                service.name,
                error.code,
                error,
            )
        # Broad on purpose: a bug in one batch must not end the service that all runs depend on.
        # docs/architecture.md lists all such places.
        except Exception:
            log.exception("%s failed in a step and goes on.", service.name)
        failures += 1
        stop.wait(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10)))
    service.close()


def reduce_garbage_collection() -> None:
    """Exclude all loaded objects from garbage collection, and collect the others less often.

    Called by a process that is ready to work. Most later objects are freed without the collector,
    which at its defaults takes a quarter of a worker's event loop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def process_id(kind: str) -> str:
    """Return a unique name for this process, readable in `ps` and Flower."""
    return f"{kind}@{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
