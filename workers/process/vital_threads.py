"""Threads without which a worker must not go on: heartbeats, outbox, event loop.

Used as the outermost block of such a thread. Otherwise an unexpected error would end the thread
alone, and the worker would take requests without reporting their outcomes. Must not: hide an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def vital(thread: str) -> Iterator[None]:
    """End the process with a traceback and code 70 if this block ends by an error.

    The process ends at once, like after `kill -9`: its supervisor starts it again, and its
    attempts run again when their leases end. An orderly stop would need the thread that failed.
    """
    try:
        yield
    except BaseException:
        log.critical(
            'The thread "%s" failed, and a worker cannot work without it: the process ends with '
            "code %d. Its attempts run again on other workers.",
            thread,
            os.EX_SOFTWARE,
            exc_info=True,
        )
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(os.EX_SOFTWARE)
