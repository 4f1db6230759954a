"""Run a blocking function beside the event loop, without a pool that it could fill for ever.

Called for sync tools and sync LLM functions. One daemon thread per call: a tool that never returns
costs one thread, where the loop's default pool of a few threads would be used up, and such a thread
does not keep the process alive at its end.
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
    """Say whether calling it gives an awaitable: functions, partials, objects with `__call__`."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(
        getattr(func, "__call__", None)  # noqa: B004 - the bound method itself is inspected
    )


async def call_anyhow(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an async function in the loop, a sync one in a thread; await what it returns if need be.

    Context variables are visible to the function. A cancelled call leaves its thread to finish
    alone and drops its result.
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
            # sys.exit() in a thread ends that thread, never the process; a future cannot carry
            # StopIteration.
            done.set_exception(RuntimeError(f"the function raised {error!r}"))

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except BaseException as raised:  # none may be lost: the waiting coroutine gets it
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:
            pass  # the loop has closed: nobody waits for this call any more

    threading.Thread(target=run, name="sync-call", daemon=True).start()
    return await done
