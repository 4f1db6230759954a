"""One model call of an attempt, from its request to its last reader, and the table of them.

The call is a task of its own: it is recorded also when its client leaves, and a repeated request
gets its answer. Used by the server, on the event loop. Must not: know HTTP or a dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta


@dataclass(frozen=True, slots=True)
class RequestMarks:
    """The marks by which gateways that share no memory recognise a request and its repetition.

    Args:
        identity: Of the idempotency key, else of path and body; hexadecimal digits.
        supersedes: Whether the request repeats one that this gateway has not seen, so that another
            gateway's answer was lost.
    """

    identity: str
    supersedes: bool


class LiveCall:
    """A call under way or done; its deltas and its response can be read by several readers.

    `is_read` says whether a client still reads it; `was_delivered` whether one has read it all.
    """

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.was_delivered = False
        self.is_read: Callable[[], bool] = lambda: False
        self._deltas: list[ResponseDelta] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[ModelResponse] | None = None

    def start(self, work: Coroutine[Any, Any, ModelResponse], context: Context) -> None:
        """Begin the call in its attempt's context."""
        self._task = asyncio.get_running_loop().create_task(work, context=context)
        self._task.add_done_callback(lambda _: self._changed.set())

    def on_delta(self, delta: ResponseDelta) -> None:
        """Take a piece of the response from the client."""
        self._deltas.append(delta)
        self._changed.set()

    @property
    def has_failed(self) -> bool:
        """Whether the call ended without a response."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or bool(task.exception()))

    async def deltas(self) -> AsyncIterator[ResponseDelta]:
        """Yield the pieces so far and those that come, until the call has ended."""
        read = 0
        while True:
            self._changed.clear()
            while read < len(self._deltas):
                yield self._deltas[read]
                read += 1
            if self._task is None or self._task.done():
                return
            await self._changed.wait()

    async def result(self) -> ModelResponse | None:
        """Wait for the response; None: the call was cancelled, because its attempt has ended.

        Raises:
            Exception: The error of the call.
        """
        assert self._task is not None
        if not self._task.done():
            await asyncio.wait({self._task})
        return None if self._task.cancelled() else self._task.result()

    def cancel(self) -> None:
        """End the call: its attempt has ended."""
        if self._task is not None:
            self._task.cancel()


class AttemptCalls:
    """The calls of one attempt, found again by their digests and idempotency keys."""

    def __init__(self) -> None:
        self._calls: list[LiveCall] = []
        self._by_key: dict[str, LiveCall] = {}
        self._seen: set[str] = set()

    def marks(self, digest: bytes, *, key: str | None, is_repeat: bool) -> RequestMarks:
        """Return the marks of a new call; arguments as in `earlier`."""
        source = digest if key is None else key.encode()
        identity = blake2b(source, digest_size=16).hexdigest()
        is_new = identity not in self._seen
        self._seen.add(identity)
        return RequestMarks(identity, is_new and (is_repeat or key is not None))

    def earlier(self, digest: bytes, *, key: str | None, is_repeat: bool) -> LiveCall | None:
        """Return the call that a request repeats; None: the request is a new one.

        Args:
            digest: Of the request's path and body.
            key: The idempotency key of the request.
            is_repeat: Whether the client marks the request as a repetition. Otherwise equal
                requests are different calls.
        """
        if key is not None:
            found = self._by_key.get(key)
            return None if found is None or found.has_failed else found
        if not is_repeat:
            return None
        equal = [call for call in self._calls if call.digest == digest and not call.is_read()]
        lost = next((call for call in equal if not call.was_delivered), None)
        if lost is not None and lost.has_failed:
            # Each failed call is repeated once; equal calls have answers of their own.
            self._calls.remove(lost)
            return None
        return lost or next(iter(equal), None)

    def add(self, call: LiveCall, *, key: str | None) -> None:
        """Keep a call until its attempt ends."""
        self._calls.append(call)
        if key is not None:
            self._by_key[key] = call

    def cancel(self) -> None:
        """End the calls under way."""
        for call in self._calls:
            call.cancel()
