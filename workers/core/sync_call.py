"""Call a sync function from the event loop in a daemon thread of its own.

Called for sync tools, rewards and model clients. A function that never returns costs one thread; in
the loop's default pool of a few threads such functions would block all others. Daemon threads do
not keep the process alive at its end. Must not: block the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any


def is_async_callable(func: Any) -> bool:
    """Say whether a call returns an awaitable, also for partials and objects with `__call__`."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(
        getattr(func, "__call__", None)  # noqa: B004 - the bound method itself is inspected
    )


async def call_sync_or_async(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an async function in the loop, a sync one in a thread; an awaitable result is awaited.

    The function sees the caller's context variables. After a cancelled call the thread continues
    and its result is dropped.
    """
    if is_async_callable(func):
        return await func(*args, **kwargs)
    result = await _call_in_thread(functools.partial(func, *args, **kwargs))
    return await result if inspect.isawaitable(result) else result


async def _call_in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            done.set_exception(error)
        else:
            # SystemExit must not end the process, and a future cannot hold StopIteration.
            done.set_exception(RuntimeError(f"the function raised {error!r}"))

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except BaseException as raised:  # any exception goes to the waiting coroutine
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:
            pass  # the loop has closed, so no coroutine waits for this call

    threading.Thread(target=run, name="sync-call", daemon=True).start()
    return await done
