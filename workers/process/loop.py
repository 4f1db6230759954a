"""The worker process's one event loop, in a thread of its own.

Celery's thread starts the tasks of requests on it; other threads submit a coroutine and wait for
its result. Must not: be blocked; heartbeats report that.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from workers.process.vital_threads import vital

log = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """An event loop (uvloop where installed) running in a thread."""

    def __init__(self) -> None:
        self._loop = new_loop()
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()  # the loop alone would not keep them
        self._thread = threading.Thread(target=self._run, name="event-loop", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the loop that returns nothing; callable from any thread."""

        def create() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(create)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; callable from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Call a function on the loop and return its result.

        Raises:
            TimeoutError: The loop is blocked and did not call the function in time.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                # The caller gets every exception.
                except BaseException as error:
                    future.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def current_stack(self) -> str:
        """Return the current stack of the loop's thread, which shows the blocking call."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(not running)"

    def stop(self) -> None:
        """Stop the loop and wait for its thread."""
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with vital(self._thread.name):
            # Foreign code in a task may exit or stop the loop; that would end all attempts.
            while not self._is_stopping:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    log.error(
                        "A task tried to end the process by %r; the event loop goes on.", error
                    )
                else:
                    if not self._is_stopping:
                        log.error("A task stopped the event loop; the event loop goes on.")


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's where that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
