"""The worker process's one event loop, in a thread of its own.

Task threads hand their coroutine over and wait. Must not: be blocked; the heartbeat watches that.
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

log = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """An event loop (uvloop where there is one) running in a thread."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="event-loop", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Call a function on the loop and return what it does.

        Raises:
            TimeoutError: The loop did not get to it: something blocks it.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                # Handed to the caller, whatever it is.
                except BaseException as error:
                    answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise

    def where(self) -> str:
        """Return the stack the loop's thread is in: what blocks it."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(not running)"

    def stop(self) -> None:
        """Stop the loop and wait for its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # Of a task that foreign code made: its exit would take all attempts along.
                log.error("A task tried to end the process by %r; the event loop goes on.", error)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
