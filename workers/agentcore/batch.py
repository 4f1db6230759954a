"""Many sessions at once: started up to a limit, polled until done, yielded as they complete.

`RolloutClient` and `BatchRunner` make batches of functions that begin a session each. A session
that fails is an item, never the end of the batch. Must not: know payloads or keys.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

#: Blocking calls of a batch that run at once.
_THREADS = 32
_POLL_S = 0.25

log = logging.getLogger(__name__)


class SessionResult(Protocol):
    """The result of a session under way: a `RolloutFuture`."""

    result_key: str

    def done(self) -> bool:
        """Poll once whether the result is there."""
        ...

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the result, and stop the session."""
        ...

    def cancel(self) -> bool:
        """Stop the session."""
        ...

    def elapsed(self) -> float:
        """Return the seconds since the invocation."""
        ...


@dataclass(frozen=True, slots=True)
class BatchItem:
    """The end of one session; `error` is the text of a failure."""

    index: int
    success: bool
    result: dict[str, Any] | None = None
    error: str | None = None
    elapsed_s: float = 0.0

    @property
    def elapsed(self) -> float:
        """The seconds, under the name of the public toolkit."""
        return self.elapsed_s


#: Begins a session, or returns the item of one that is done already.
Start = Callable[[], SessionResult | BatchItem]


@dataclass(frozen=True, slots=True)
class BatchWaits:
    """The times of a batch, in seconds."""

    timeout: float = 900.0  #: longest wait for each result
    initial_interval: float = 0.5  #: between the first two polls of a result
    max_interval: float = 30.0  #: longest time between two polls
    backoff_factor: float = 1.5  #: growth of that time
    log_interval: float = 30.0  #: between two log lines about the progress


def item_of(index: int, result: dict[str, Any], elapsed_s: float) -> BatchItem:
    """Return the item of a result: an app's error is no success."""
    if result.get("status_code") == 200:
        return BatchItem(index, True, result, None, elapsed_s)
    error = str(result.get("stop_reason") or "The app gave no reason.")
    return BatchItem(index, False, result, error, elapsed_s)


class AsyncBatchResult:
    """The items of a batch, as an asynchronous iterator.

    Args:
        starts: Begin a session each, or return the item of one that is done already.
        max_concurrent_sessions: Sessions at once.
        waits: The times of the batch.
        announced: Keys of results that are known to be there, filled by another thread.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        max_concurrent_sessions: int,
        waits: BatchWaits,
        *,
        announced: set[str] | None = None,
    ) -> None:
        self._starts = starts
        self._slots = asyncio.Semaphore(max(1, max_concurrent_sessions))
        self._waits = waits
        self._announced = announced if announced is not None else set[str]()
        #: Longest sleep: announcements come from another thread.
        self._longest_sleep_s = _POLL_S if announced is not None else float("inf")
        self._log_at = time.monotonic() + waits.log_interval
        self._done = 0

    async def __aiter__(self) -> AsyncIterator[BatchItem]:
        threads = ThreadPoolExecutor(_THREADS, "batch")
        items: asyncio.Queue[BatchItem] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._run(index, start, items, threads))
            for index, start in enumerate(self._starts)
        ]
        try:
            for _ in tasks:
                item = await items.get()
                self._done += 1
                yield item
        finally:
            # The consumer may have stopped iterating: sessions under way are stopped.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            threads.shutdown()

    async def _run(
        self, index: int, start: Start, items: asyncio.Queue[BatchItem], threads: ThreadPoolExecutor
    ) -> None:
        async with self._slots:
            began_at = time.monotonic()
            try:
                item = await self._one(index, start, threads)
            # Broad on purpose: the error of one session does not end the others.
            except Exception as error:
                text = "".join(traceback.format_exception_only(error)).strip()
                item = BatchItem(index, False, None, text, time.monotonic() - began_at)
        items.put_nowait(item)

    async def _one(self, index: int, start: Start, threads: ThreadPoolExecutor) -> BatchItem:
        loop = asyncio.get_running_loop()
        began = loop.run_in_executor(threads, start)
        try:
            future = await asyncio.shield(began)
        except asyncio.CancelledError:
            began.add_done_callback(_cancel_begun)
            raise
        if isinstance(future, BatchItem):
            return future
        try:
            await self._wait(future, threads)
        except BaseException:
            threads.submit(future.cancel)
            raise
        result = await loop.run_in_executor(threads, future.result, 0.0)
        return item_of(index, result, future.elapsed())

    async def _wait(self, future: SessionResult, threads: ThreadPoolExecutor) -> None:
        """Poll until the result is there, at once after its announcement."""
        waits, loop = self._waits, asyncio.get_running_loop()
        interval_s, poll_at = waits.initial_interval, time.monotonic() + waits.initial_interval
        while True:
            self._log_progress()
            is_last = future.elapsed() > waits.timeout
            if is_last or time.monotonic() >= poll_at or future.result_key in self._announced:
                self._announced.discard(future.result_key)
                try:
                    if await loop.run_in_executor(threads, future.done):
                        return
                # Broad on purpose: one failing poll ends no session.
                except Exception as error:
                    log.warning("A result cannot be polled: %s", error)
                if is_last:
                    raise TimeoutError(f"Timeout after {waits.timeout:g} s")
                interval_s = min(interval_s * waits.backoff_factor, waits.max_interval)
                poll_at = time.monotonic() + interval_s
            left_s = waits.timeout - future.elapsed()
            sleep_s = min(self._longest_sleep_s, poll_at - time.monotonic(), left_s)
            await asyncio.sleep(max(0.0, sleep_s))

    def _log_progress(self) -> None:
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + self._waits.log_interval
            log.info("%d of %d sessions are done.", self._done, len(self._starts))


class BatchResult:
    """The items of a batch, as an iterator; works inside a running event loop too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._arguments, self._options = arguments, options

    def __iter__(self) -> Iterator[BatchItem]:
        items: queue.SimpleQueue[BatchItem | BaseException | None] = queue.SimpleQueue()
        is_abandoned = threading.Event()

        async def run() -> None:
            async for item in AsyncBatchResult(*self._arguments, **self._options):
                items.put(item)
                if is_abandoned.is_set():
                    return

        def drive() -> None:
            try:
                asyncio.run(_run_unless(run(), is_abandoned))
                items.put(None)
            # The consumer gets every exception.
            except BaseException as error:
                items.put(error)

        thread = threading.Thread(target=drive, name="batch", daemon=True)
        thread.start()
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            is_abandoned.set()
            thread.join()


async def _run_unless(work: Any, is_abandoned: threading.Event) -> None:
    """Run a coroutine, and cancel it when its consumer has stopped iterating."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=_POLL_S)
        if is_abandoned.is_set() and not task.done():
            task.cancel()
    if not task.cancelled():
        task.result()


def _cancel_begun(began: Any) -> None:
    if not began.cancelled() and began.exception() is None:
        future = began.result()
        if not isinstance(future, BatchItem):
            threading.Thread(target=future.cancel, name="stop").start()
