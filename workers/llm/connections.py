"""One connection pool per endpoint and event loop, shared by all clients that name it.

A new pool costs tens of milliseconds and new TLS handshakes, so clients share one. Model clients
call this module. `asyncio.run` closes the connections of its loop; a process that ends its loop in
another way calls `close_connections` first. Must not: use more of a connection than its `aclose`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast


class Connection(Protocol):
    """A connection that must be closed on the event loop that opened it."""

    def aclose(self) -> Awaitable[None]:
        """Close the connection and free its sockets."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=Connection)


@dataclass(slots=True)
class _Shared:
    connection: Any
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


_shared: dict[tuple[asyncio.AbstractEventLoop, Hashable], _Shared] = {}
#: By event loop, the generator that closes its connections when the loop is shut down.
_closers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
_lock = threading.Lock()  # event loops in several threads share the table


def shared_connection(
    user: object, key: Hashable, connect: Callable[[], ConnectionT]
) -> ConnectionT:
    """Return the running loop's connection of this key, made on first use."""
    slot = (asyncio.get_running_loop(), key)
    shared = _shared.get(slot)
    if shared is None:
        shared = _Shared(connect())
        with _lock:
            _forget_closed_loops()
            _shared[slot] = shared
        _close_with(slot[0])
    if user not in shared.users:
        shared.users.add(user)
    return cast(ConnectionT, shared.connection)


async def release_connections(user: object) -> None:
    """Close the running loop's connections that have no user besides `user`."""
    loop = asyncio.get_running_loop()
    for slot, shared in [item for item in _shared.items() if item[0][0] is loop]:
        shared.users.discard(user)
        if not shared.users:
            await _close(slot)


async def close_connections() -> None:
    """Close every connection of the running loop, at the end of a process or test."""
    loop = asyncio.get_running_loop()
    for slot in [slot for slot in _shared if slot[0] is loop]:
        await _close(slot)


def _close_with(loop: asyncio.AbstractEventLoop) -> None:
    """Let `asyncio.run` close the connections: at its end it closes asynchronous generators."""
    if loop in _closers:
        return
    _closers[loop] = closer = _close_at_the_end(loop)
    with suppress(StopIteration):
        closer.__anext__().send(None)  # runs to its `yield` without waiting


async def _close_at_the_end(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        del _closers[loop]
        await close_connections()


async def _close(slot: tuple[asyncio.AbstractEventLoop, Hashable]) -> None:
    with _lock:
        shared = _shared.pop(slot, None)
    if shared is not None:
        await shared.connection.aclose()


def _forget_closed_loops() -> None:
    for slot in [slot for slot in _shared if slot[0].is_closed()]:
        del _shared[slot]
    for loop in [loop for loop in _closers if loop.is_closed()]:
        _closers.pop(loop, None)
