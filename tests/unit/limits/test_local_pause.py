"""Without Redis, calls are unlimited and only pause after 429s."""

import asyncio

import pytest

from pipeline.limits import local_pause
from pipeline.limits.local_pause import LocalPause, LocalPauses


@pytest.fixture(autouse=True)
def no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_pause, "RESUME_SPREAD_S", 0.0)


async def meet(pause: LocalPause, refusals: int, retry_after_s: float | None) -> None:
    for _ in range(refusals):
        pause.settle(0, "rate_limited")
        pause.note_rate_limited(retry_after_s)


async def waited_s(pause: LocalPause) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await pause.acquire(0)
    return loop.time() - started


async def test_calls_pass_at_once_until_most_of_them_are_refused() -> None:
    pause = LocalPause()
    for _ in range(20):
        assert pause.acquire_at_once(0) is pause
        pause.settle(0, "ok")
    await meet(pause, 1, 5.0)
    assert pause.acquire_at_once(0) is pause


async def test_frequent_429s_pause_calls_for_as_long_as_the_endpoint_asked() -> None:
    pause = LocalPause()
    await meet(pause, 5, 0.2)
    assert pause.acquire_at_once(0) is None
    assert await waited_s(pause) >= 0.19
    assert pause.acquire_at_once(0) is pause


async def test_a_pause_is_prolonged_while_calls_wait() -> None:
    pause = LocalPause()
    await meet(pause, 5, 0.1)
    wait = asyncio.create_task(waited_s(pause))
    await asyncio.sleep(0.05)
    await meet(pause, 1, 0.2)
    assert await wait >= 0.24


async def test_runs_share_the_pause_of_an_endpoint_and_model() -> None:
    pauses = LocalPauses()
    first = pauses.for_run("http://e/v1", "m", run="a", weight=1.0)
    assert pauses.for_run("http://e/v1", "m", run="b", weight=2.0) is first
    assert pauses.for_run("http://e/v1", "other", run="a", weight=1.0) is not first
