import asyncio
import contextvars
import functools
import threading

import pytest

from workers.core.sync_call import call_sync_or_async, is_async_callable

request = contextvars.ContextVar("request", default="none")


async def test_a_sync_function_sees_the_callers_context_in_its_thread():
    request.set("r7")
    name = await call_sync_or_async(lambda: (request.get(), threading.current_thread().name))
    assert name == ("r7", "sync-call")


async def test_what_a_sync_function_raises_is_raised_here():
    def fail():
        raise KeyError("k")

    with pytest.raises(KeyError):
        await call_sync_or_async(fail)


@pytest.mark.parametrize("error", [SystemExit(2), StopIteration(), KeyboardInterrupt()])
async def test_what_would_end_the_process_or_a_future_is_an_ordinary_error(error):
    def fail():
        raise error

    with pytest.raises(RuntimeError, match="the function raised"):
        await call_sync_or_async(fail)


async def test_a_cancelled_call_drops_its_late_result():
    begun, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait():
        loop.call_soon_threadsafe(begun.set)
        release.wait(10)

    call = asyncio.create_task(call_sync_or_async(wait))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    release.set()
    await asyncio.sleep(0)


def test_async_callables_are_told_from_sync_ones():
    class AsyncCall:
        async def __call__(self): ...

    async def function(): ...

    assert is_async_callable(function)
    assert is_async_callable(functools.partial(function))
    assert is_async_callable(AsyncCall())
    assert not is_async_callable(print)
    assert not is_async_callable(lambda: function())
