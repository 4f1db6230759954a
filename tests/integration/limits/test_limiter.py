"""One process's limiter, over a real Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fixtures.speed import at_least, at_most, one_of_three

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.limits.lease import Lease
from pipeline.limits.limiter import Limiter
from pipeline.limits.pool import LimiterPool
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import ANY_MODEL, LimitStatus

ENDPOINT, MODEL = "http://127.0.0.1:9/v1", "m"

pytestmark = pytest.mark.timeout(30)


async def limited(pool: LimiterPool, **limits: int | bool) -> Limiter:
    await pool.store.set(ENDPOINT, MODEL, LimitSettings.model_validate(limits))
    return pool.limiter(ENDPOINT, MODEL)


async def status(pool: LimiterPool) -> LimitStatus:
    return next(row for row in await pool.store.show() if row.model == MODEL)


async def within(seconds: float, holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def call(
    limiter: Limiter, run: str, *, tokens: int = 0, weight: float = 1.0
) -> AsyncIterator[None]:
    lease = await limiter.acquire(run=run, weight=weight, estimated_tokens=tokens)
    try:
        yield
    finally:
        lease.settle(tokens)


async def acquire_within(seconds: float, limiter: Limiter) -> Lease | None:
    """Acquire a lease; None if none is granted in time."""
    try:
        async with asyncio.timeout(seconds):
            return await limiter.acquire(run="r", estimated_tokens=0)
    except TimeoutError:
        return None


async def calls(limiter: Limiter, count: int, *, run: str = "r", tokens: int = 0) -> list[float]:
    """Make calls one after the other; give when each was granted."""
    granted = []
    for _ in range(count):
        async with call(limiter, run, tokens=tokens):
            granted.append(time.monotonic())
    return granted


async def test_without_limits_a_call_costs_no_call_of_redis(pool: LimiterPool) -> None:
    limiter = pool.limiter(ENDPOINT, MODEL)
    await calls(limiter, 1)
    before = limiter.shared.calls
    await asyncio.gather(*(calls(limiter, 200) for _ in range(10)))
    assert limiter.shared.calls - before <= 1
    assert limiter.in_flight == 0


async def test_a_limit_set_later_is_noticed_by_itself(pool: LimiterPool) -> None:
    limiter = pool.limiter(ENDPOINT, MODEL)
    await calls(limiter, 1)
    await limited(pool, max_concurrency=1)
    held: list[Lease] = []

    async def is_limited() -> bool:
        lease = await acquire_within(0.2, limiter)
        if lease is not None:
            held.append(lease)
        return lease is None

    await within(20, is_limited)


async def test_lifted_limits_let_everybody_through(pool: LimiterPool) -> None:
    limiter = await limited(pool, requests_per_minute=1)
    await calls(limiter, 1)
    waiting = asyncio.gather(*(calls(limiter, 1) for _ in range(20)))
    await asyncio.sleep(0)
    await limited(pool)
    async with asyncio.timeout(20):
        await waiting


async def test_limits_of_a_model_and_of_its_endpoint_both_hold(pool: LimiterPool) -> None:
    await pool.store.set(ENDPOINT, ANY_MODEL, LimitSettings(max_concurrency=3))
    await pool.store.set(ENDPOINT, "small", LimitSettings(max_concurrency=2))

    async def may_call(model: str) -> bool:
        lease = await acquire_within(0.3, pool.limiter(ENDPOINT, model))
        if lease is not None:
            held.append(lease)
        return lease is not None

    held: list[Lease] = []
    assert [await may_call("small") for _ in range(3)] == [True, True, False]
    assert [await may_call("large") for _ in range(2)] == [True, False]
    held.pop().settle(0)
    assert await may_call("large")
    for lease in held:
        lease.settle(0)


async def test_the_pace_of_an_endpoint_holds_over_its_models_in_one_call_of_redis(
    pool: LimiterPool,
) -> None:
    rate = LimitSettings(requests_per_minute=6_000, burst=5)
    await pool.store.set(ENDPOINT, ANY_MODEL, rate)
    await pool.store.set(ENDPOINT, "small", rate)
    limiters = [pool.limiter(ENDPOINT, model) for model in ("small", "large")]
    granted: list[float] = []

    async def caller(limiter: Limiter) -> None:
        while True:
            granted.extend(await calls(limiter, 1))

    tasks = [asyncio.create_task(caller(limiter)) for limiter in limiters for _ in range(20)]
    await asyncio.sleep(2.5)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    seconds = [sum(start <= at < start + 1 for at in granted) for start in granted]
    assert max(seconds) <= 105
    assert len(granted) >= 60, "neither starves the other, nor both themselves"
    asked = sum(limiter.shared.calls for limiter in limiters)
    assert asked <= 0.8 * len(granted)


async def test_cancelled_waits_leak_no_units(pool: LimiterPool) -> None:
    limiter = await limited(pool, max_concurrency=3)
    held = [await limiter.acquire(run="r", estimated_tokens=0) for _ in range(3)]
    waits = [asyncio.create_task(limiter.acquire(run="r", estimated_tokens=0)) for _ in range(50)]

    async def all_wait() -> bool:
        return (await status(pool)).waiting == 50

    await within(20, all_wait)
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    for lease in held:
        lease.settle(0)
    again = [await acquire_within(2, limiter) for _ in range(3)]
    assert limiter.in_flight == 3
    for lease in again:
        assert lease is not None
        lease.settle(0)

    async def all_free() -> bool:
        row = await status(pool)
        return row.waiting == 0 and row.in_flight == 0

    await within(20, all_free)


async def test_a_wait_cancelled_in_the_tick_it_is_served_leaks_nothing(pool: LimiterPool) -> None:
    limiter = await limited(pool, max_concurrency=1)
    for _ in range(30):
        lease = await limiter.acquire(run="r", estimated_tokens=0)
        wait = asyncio.create_task(limiter.acquire(run="r", estimated_tokens=0))
        await asyncio.sleep(0)
        lease.settle(0)
        while limiter.in_flight == 0:
            await asyncio.sleep(0)
        wait.cancel()  # Its lease is made, but it has not run since.
        await asyncio.wait([wait])
        if not wait.cancelled():
            wait.result().settle(0)
        assert limiter.in_flight == 0
    await calls(limiter, 3)


@one_of_three
async def test_slots_of_callers_that_gave_up_go_to_the_next(pool: LimiterPool) -> None:
    limiter = await limited(pool, requests_per_minute=6_000, burst=1)
    await calls(limiter, 1)
    waits = [asyncio.create_task(calls(limiter, 1)) for _ in range(60)]
    await asyncio.sleep(0.1)
    started = time.monotonic()
    for wait in waits[:55]:
        wait.cancel()
    await asyncio.wait(waits)
    # Five slots, or the rest of those that were due: never the 0.5 s that all sixty would take.
    at_most(time.monotonic() - started, 0.3)


@one_of_three
async def test_unused_tokens_are_refunded(pool: LimiterPool) -> None:
    limiter = await limited(pool, tokens_per_minute=6_000, token_burst=100)
    lease = await limiter.acquire(run="r", estimated_tokens=200)
    lease.settle(10)
    started = time.monotonic()
    await calls(limiter, 1, tokens=50)
    # 200 tokens are two seconds of this limit; ten of them a tenth.
    at_most(time.monotonic() - started, 1.2)


async def test_tokens_beyond_the_estimate_are_charged(pool: LimiterPool) -> None:
    limiter = await limited(pool, tokens_per_minute=6_000, token_burst=100)
    lease = await limiter.acquire(run="r", estimated_tokens=1)
    lease.settle(120)
    started = time.monotonic()
    await calls(limiter, 1, tokens=1)
    assert time.monotonic() - started > 0.8


@one_of_three
async def test_a_refused_call_used_no_tokens(pool: LimiterPool) -> None:
    limiter = await limited(pool, tokens_per_minute=6_000, token_burst=100)
    lease = await limiter.acquire(run="r", estimated_tokens=500)
    lease.settle(0, "rate_limited")
    started = time.monotonic()
    await calls(limiter, 1, tokens=20)
    at_most(time.monotonic() - started, 1)


@one_of_three
async def test_a_call_larger_than_the_burst_is_granted_all_the_same(pool: LimiterPool) -> None:
    limiter = await limited(pool, tokens_per_minute=600_000, token_burst=50)
    started = time.monotonic()
    await calls(limiter, 3, tokens=3_000)
    waited_s = time.monotonic() - started
    assert waited_s >= 0.5
    at_most(waited_s, 1.5)


@one_of_three
async def test_a_429_pauses_calls_for_as_long_as_it_asked(pool: LimiterPool) -> None:
    limiter = await limited(pool, requests_per_minute=60_000)
    await calls(limiter, 3)
    limiter.pause(0.8)
    started = time.monotonic()
    wait = asyncio.create_task(calls(limiter, 1))
    await asyncio.sleep(0.1)
    assert (await status(pool)).backing_off_until is not None
    await wait
    waited_s = time.monotonic() - started
    assert waited_s >= 0.75
    at_most(waited_s, 1.3)


@one_of_three
async def test_a_429_pauses_calls_even_where_nothing_is_limited(pool: LimiterPool) -> None:
    limiter = pool.limiter(ENDPOINT, MODEL)
    await calls(limiter, 1)
    limiter.pause(0.5)
    started = time.monotonic()
    times = await asyncio.gather(*(calls(limiter, 1) for _ in range(50)))
    first, last = min(t[0] for t in times), max(t[0] for t in times)
    assert first - started >= 0.45
    # They do not all come back at the same moment.
    at_least(last - first, 0.3)


async def test_a_429_that_names_no_time_pauses_longer_each_time(pool: LimiterPool) -> None:
    limiter = await limited(pool, requests_per_minute=60_000)
    pauses = []
    for _ in range(2):
        await calls(limiter, 1)
        for _ in range(20):
            limiter.pause(None)
        started = time.monotonic()
        await calls(limiter, 1)
        pauses.append(time.monotonic() - started)
    assert 0.7 <= pauses[0] < 1.7 <= pauses[1] < 3.7


async def test_runs_of_one_process_share_a_cap_by_weight(pool: LimiterPool) -> None:
    limiter = await limited(pool, max_concurrency=8)
    granted = {"three": 0, "one": 0}
    until = time.monotonic() + 2.5

    async def caller(run: str, weight: float) -> None:
        while time.monotonic() < until:
            async with call(limiter, run, weight=weight):
                await asyncio.sleep(0.02)
                granted[run] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(caller("three", 3.0))
            group.create_task(caller("one", 1.0))
    assert 2.5 <= granted["three"] / granted["one"] <= 3.5


@one_of_three
async def test_the_adaptive_cap_finds_what_an_endpoint_bears(pool: LimiterPool) -> None:
    limiter = await limited(pool, adaptive=True)
    bears, in_flight, caps = 16, 0, []
    until = time.monotonic() + 4

    async def caller() -> None:
        nonlocal in_flight
        while time.monotonic() < until:
            lease = await limiter.acquire(run="r", estimated_tokens=0)
            in_flight += 1
            is_refused = in_flight > bears
            await asyncio.sleep(0.005 if is_refused else 0.05)
            in_flight -= 1
            lease.settle(0, "rate_limited" if is_refused else "ok")

    async def watch() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(0.1)
            caps.append((await status(pool)).cap or 0)

    async with asyncio.TaskGroup() as group:
        for _ in range(80):
            group.create_task(caller())
        group.create_task(watch())
    settled = caps[len(caps) // 2 :]
    at_least(max(caps), bears + 1)
    at_least(min(settled), 0.4 * bears)
    at_most(max(settled), 1.5 * bears)


async def test_a_lease_that_is_settled_twice_ends_one_call(pool: LimiterPool) -> None:
    limiter = await limited(pool, max_concurrency=2)
    lease = await limiter.acquire(run="r", estimated_tokens=0)
    await limiter.acquire(run="r", estimated_tokens=0)
    lease.settle(0)
    lease.settle(0, "error")
    assert limiter.in_flight == 1


async def test_a_closed_limiter_refuses_and_frees_its_units(pool: LimiterPool) -> None:
    limiter = await limited(pool, max_concurrency=1)
    await limiter.acquire(run="r", estimated_tokens=0)
    wait = asyncio.create_task(limiter.acquire(run="r", estimated_tokens=0))
    await asyncio.sleep(0.05)
    await limiter.close()
    with pytest.raises(NotAllowed):
        await wait
    with pytest.raises(NotAllowed):
        await limiter.acquire(run="r", estimated_tokens=0)
    row = await status(pool)
    assert (row.in_flight, row.waiting) == (0, 0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_weight_that_means_nothing_is_refused(weight: float, pool: LimiterPool) -> None:
    with pytest.raises(InputError):
        await pool.limiter(ENDPOINT, MODEL).acquire(run="r", weight=weight, estimated_tokens=0)


async def test_a_model_client_of_a_run_uses_it_without_knowing_runs(pool: LimiterPool) -> None:
    await limited(pool, max_concurrency=1, tokens_per_minute=60_000)
    client_side = pool.for_run(ENDPOINT, MODEL, run="r", weight=2.0)
    for _ in range(3):
        lease = await client_side.acquire(10)
        lease.settle(12, "ok")
    assert pool.limiter(ENDPOINT + "/", MODEL).in_flight == 0


async def test_frequent_429s_pause_a_runs_calls_and_a_single_one_does_not(
    pool: LimiterPool,
) -> None:
    await limited(pool, requests_per_minute=60_000)
    limiter = pool.for_run(ENDPOINT, MODEL, run="r", weight=1.0)

    async def is_paused() -> bool:
        return (await status(pool)).backing_off_until is not None

    for _ in range(20):
        (await limiter.acquire(10)).settle(12, "ok")
    limiter.note_rate_limited(5.0)
    await asyncio.sleep(0.2)
    assert not await is_paused()
    for _ in range(20):
        (await limiter.acquire(10)).settle(0, "rate_limited")
        limiter.note_rate_limited(0.05)
    limiter.note_rate_limited(5.0)
    await within(5, is_paused)
