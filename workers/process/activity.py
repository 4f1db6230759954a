"""Counts each run's model calls, the failed ones among them, and its tool calls in this worker.

Written on the event loop by the model clients and `execute`, read there by heartbeats. Must not:
grow with the number of calls, or raise because of values that an agent left in its trajectory.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

from pipeline.contract.activity import (
    UNREADABLE_CALLS,
    CallFailures,
    EndpointCalls,
    RunActivity,
    ToolCalls,
)
from pipeline.contract.errors import ModelError
from pipeline.contract.messages import storable
from pipeline.redaction import NOTHING, Redactor
from workers.core.trajectory import LOST_CALLS
from workers.process.attempt import Attempt
from workers.process.call_warnings import CallWarnings

#: Called after each try of a model call, with its error; with None if the model answered.
WatchTry = Callable[[ModelError | None], None]

#: Bounds of a heartbeat, because SQS takes 256 KiB. Only the newest runs are sent; endpoints, codes
#: and tools beyond the bound are counted under `other`.
MOST_RUNS = 8
_MOST_ENDPOINTS = 8
_MOST_CODES = 6
_MOST_TOOLS = 32
_OTHER = "other"

_MINUTE_S = 60
_MESSAGE_CHARS = 120
#: Models invent tool names of any length.
_NAME_CHARS = 64

_URL_IN_FRONT = re.compile(r"^https?://\S+\s+")

T = TypeVar("T")


class Activity:
    """The activity of the newest runs of this worker.

    Args:
        warnings: Logs failing calls.
        redactor: Removes secrets from URLs and error texts.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        warnings: CallWarnings | None = None,
        *,
        redactor: Redactor = NOTHING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warnings = warnings or CallWarnings()
        self._redactor = redactor
        self._clock = clock
        self._runs: dict[UUID, _RunCounts] = {}
        self._under_way: set[Attempt] = set()

    def watcher(self, run_id: UUID, base_url: str, model: str) -> WatchTry:
        """Return the function that a client calls after each try at this endpoint."""
        shown_url = self._redactor.text(base_url)

        def watch(error: ModelError | None) -> None:
            now = self._clock()
            endpoint = self._run(run_id).endpoint(shown_url, model)
            endpoint.tries.add(now)
            if error is not None:
                reason = self.reason(error)
                endpoint.failure(error.code).add(now, reason)
                self._warnings.note(shown_url, error.code, reason, now)

        return watch

    @contextmanager
    def counted(self, attempt: Attempt) -> Iterator[None]:
        """Count the tool calls of an attempt while it runs, and keep them when it has ended."""
        run_id = attempt.request.run_id
        self._run(run_id)
        self._under_way.add(attempt)
        try:
            yield
        finally:
            self._under_way.discard(attempt)
            _add_tools(self._run(run_id).tools, attempt)

    def snapshot(self) -> tuple[RunActivity, ...]:
        """Return the sums since the worker's start, by run; log failures that are due."""
        now = self._clock()
        self._warnings.flush(now)
        tools = {run_id: dict(counts.tools) for run_id, counts in self._runs.items()}
        for attempt in self._under_way:
            # A run dropped for newer ones may still have attempts; their end counts it again.
            if (known := tools.get(attempt.request.run_id)) is not None:
                _add_tools(known, attempt)
        return tuple(
            RunActivity(run_id=run_id, endpoints=counts.endpoints(now), tools=tools[run_id])
            for run_id, counts in self._runs.items()
        )

    def _run(self, run_id: UUID) -> _RunCounts:
        counts = self._runs.get(run_id)
        if counts is None:
            if len(self._runs) >= MOST_RUNS:
                del self._runs[next(iter(self._runs))]
            counts = self._runs[run_id] = _RunCounts()
        return counts

    def reason(self, error: ModelError) -> str:
        """Return an error's cause as a short text without secrets."""
        text = _os_reason(error) or _URL_IN_FRONT.sub("", str(error)).removesuffix(".")
        return storable(self._redactor.text(text))[:_MESSAGE_CHARS]


class _RunCounts:
    """The counts of one run in this process."""

    def __init__(self) -> None:
        self.tools: dict[str, ToolCalls] = {}
        self._endpoints: dict[tuple[str, str], _EndpointCounts] = {}

    def endpoint(self, base_url: str, model: str) -> _EndpointCounts:
        key = (base_url, model)
        return _entry(self._endpoints, key, (_OTHER, ""), _EndpointCounts, _MOST_ENDPOINTS)

    def endpoints(self, now: float) -> tuple[EndpointCalls, ...]:
        return tuple(
            EndpointCalls(
                base_url=base_url,
                model=model,
                count=counts.tries.count,
                last_minute=counts.tries.last_minute(now),
                failures=counts.failures(now),
            )
            for (base_url, model), counts in self._endpoints.items()
        )


class _EndpointCounts:
    def __init__(self) -> None:
        self.tries = _Count()
        self._failures: dict[str, _Count] = {}

    def failure(self, code: str) -> _Count:
        return _entry(self._failures, code, _OTHER, _Count, _MOST_CODES)

    def failures(self, now: float) -> tuple[CallFailures, ...]:
        return tuple(
            CallFailures(
                code=code,
                count=failed.count,
                last_minute=failed.last_minute(now),
                message=failed.message,
            )
            for code, failed in self._failures.items()
        )


class _Count:
    """A number of events: in all, and in the last minute, by seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.message = ""
        self._by_second: deque[tuple[int, int]] = deque(maxlen=_MINUTE_S)

    def add(self, now: float, message: str = "") -> None:
        self.count += 1
        self.message = message
        second, n = int(now), 1
        if self._by_second and self._by_second[-1][0] == second:
            n += self._by_second.pop()[1]
        self._by_second.append((second, n))

    def last_minute(self, now: float) -> int:
        return sum(n for second, n in self._by_second if second > now - _MINUTE_S)


def _entry(known: dict[Any, T], key: Any, other: Any, make: Callable[[], T], most: int) -> T:
    """Return the entry of a key; keys beyond `most` share one."""
    if key not in known and len(known) >= most:
        key = other
    found = known.get(key)
    if found is None:
        found = known[key] = make()
    return found


def _add_tools(tools: dict[str, ToolCalls], attempt: Attempt) -> None:
    for name, count, errors in tool_counts(attempt):
        key = name if name in tools or len(tools) < _MOST_TOOLS else _OTHER
        known = tools.get(key, ToolCalls())
        tools[key] = ToolCalls(count=known.count + count, errors=known.errors + errors)


def tool_counts(attempt: Attempt) -> Iterator[tuple[str, int, int]]:
    """Yield each tool of a trajectory with its calls and errors, as the agents count them.

    Calls that could not be read are all errors, under a name of their own.
    """
    metadata: Any = attempt.trajectory.metadata
    counted = metadata.get("tools") if isinstance(metadata, dict) else None
    for name, figures in list(counted.items()) if isinstance(counted, dict) else ():
        if isinstance(name, str) and isinstance(figures, dict):
            calls, errors = figures.get("calls"), figures.get("errors")
            if isinstance(calls, int) and isinstance(errors, int):
                yield storable(name)[:_NAME_CHARS], calls, errors
    lost = metadata.get(LOST_CALLS) if isinstance(metadata, dict) else None
    if isinstance(lost, int):
        yield UNREADABLE_CALLS, lost, lost


def _os_reason(error: BaseException) -> str | None:
    """Return the operating system's text, such as `connection refused`; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and (cause.errno or 0) > 0:
            return os.strerror(cause.errno or 0).lower()
        cause = cause.__cause__
    return None
