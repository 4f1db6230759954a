"""Celery's pool of this worker: requests run as coroutines on the event loop, not in threads.

Celery gives each request to a pool. Its pool of threads would keep a thread for each attempt, only
to wait for the event loop. Here an attempt costs no thread and no switch between threads, and its
last event is what the task returns. Must not: decide anything about a rollout, or block the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from celery.concurrency.base import BasePool

from workers.process.celery_hooks import TaskEnd, WorkerRequest
from workers.process.loop import LoopThread

log = logging.getLogger(__name__)


class LoopPool(BasePool):
    """Runs at most `limit` requests at once; further ones wait, not yet acknowledged.

    The task of a request is an async function: it gets the request and the arguments of the
    message, and returns a `TaskEnd`.
    """

    loop: ClassVar[LoopThread]
    limit: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: deque[WorkerRequest] = deque()
        self._running = 0
        self._changed = threading.Condition()
        self._hub: Any = None

    def register_with_event_loop(self, hub: Any) -> None:
        """Take the loop of Celery's thread; called again after a reconnect."""
        self._hub = hub
        hub.on_tick.add(self._acknowledge)

    def _acknowledge(self) -> None:
        """Acknowledge the requests of this turn before the loop polls.

        Requests that are read by the loop's pending calls add their acknowledgements to these.
        The loop would poll first, for up to half a second. If the worker died in that time, the
        broker would deliver requests again that have started.
        """
        while pending := self._hub._pop_ready():
            for each in pending:
                each()

    def on_apply(self, *_: Any, accept_callback: Callable[..., None], **__: Any) -> None:
        """Start a request, or let it wait for a free place; never blocks.

        Celery passes the arguments for a process or thread; the request is bound to the callback.
        """
        request: Any = accept_callback.__self__  # pyright: ignore[reportFunctionMemberAccess]
        with self._changed:
            if self._running >= self.limit:
                self._waiting.append(request)
                return
            self._running += 1
        if not self._start(request):
            self._release_place()

    def flush(self) -> None:
        """Forget waiting requests: the connection is lost, and the broker delivers them again."""
        self._waiting.clear()

    def on_stop(self) -> None:
        """Wait until all running requests have ended; the waiting ones go to other workers."""
        self.flush()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def _start(self, request: WorkerRequest) -> bool:
        """Start a request that has a place; False: the connection is closing, so none starts."""
        request.on_accepted(os.getpid(), time.monotonic())
        if not request.is_left:
            self.loop.start(self._run(request))
        return not request.is_left

    async def _run(self, request: WorkerRequest) -> None:
        began = time.monotonic()
        try:
            end = await _end_of(request)
            request.finish(end, time.monotonic() - began)
        finally:
            self._release_place()

    def _release_place(self) -> None:
        """Give the place of a request that has ended to a waiting one, else to a new one."""
        while (following := self._take_waiting()) is not None:
            if self._start(following):
                return

    def _take_waiting(self) -> WorkerRequest | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            was_full = self._running == self.limit
            self._running -= 1
            self._changed.notify_all()
        if was_full and self._hub is not None:
            # While no place is free, Celery asks Redis for no request. Wake it, or the place would
            # stay empty until its next timer.
            self._hub.call_soon(lambda: None)
        return None


async def _end_of(request: WorkerRequest) -> TaskEnd:
    try:
        return await request.task.run(request, *request.args)
    except asyncio.CancelledError:
        return TaskEnd("stopped: no longer wanted", "task-revoked")
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        log.exception("The task of %s failed.", request.id)
        return TaskEnd(repr(error), "task-failed")


def pool_on(loop: LoopThread) -> type[LoopPool]:
    """Return the pool class that Celery instantiates, bound to the event loop of this process."""
    return type("LoopPool", (LoopPool,), {"loop": loop})
