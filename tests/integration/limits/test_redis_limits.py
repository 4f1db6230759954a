"""Limits in Redis: outages, lost memory, several processes, the store."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator

import pytest
from fixtures.speed import at_most, one_of_three
from redis.asyncio import Redis

from benchmarks.limit_fleet import PrivateRedis
from pipeline.contract.errors import ConfigError, InputError
from pipeline.limits.limiter import Limiter
from pipeline.limits.pool import LimiterPool
from pipeline.limits.settings import LimitSettings
from pipeline.limits.shared_limits import LimitsUnavailable
from pipeline.limits.status import ANY_MODEL
from pipeline.limits.store import LimitStore

ENDPOINT, MODEL = "http://127.0.0.1:9/v1", "m"

pytestmark = pytest.mark.timeout(40)


@pytest.fixture
async def fragile(own_redis: PrivateRedis) -> AsyncIterator[LimiterPool]:
    """A pool on a server that the test may kill."""
    pool = LimiterPool(own_redis.url)
    yield pool
    await pool.close()


@pytest.fixture
async def two_pools(redis: PrivateRedis, prefix: str) -> AsyncIterator[list[LimiterPool]]:
    pools = [LimiterPool(redis.url, prefix=prefix, lease_s=2.0) for _ in range(2)]
    yield pools
    for pool in pools:
        await pool.close()


async def count_calls(limiter: Limiter, seconds: float, *, callers: int = 20) -> int:
    """Count the calls granted to hungry callers, who give up at the end."""
    granted = 0

    async def caller() -> None:
        nonlocal granted
        while True:
            (await limiter.acquire(run="r", estimated_tokens=1)).settle(1)
            granted += 1

    tasks = [asyncio.create_task(caller()) for _ in range(callers)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return granted


async def test_calls_wait_while_redis_is_away_and_go_on_when_it_is_back(
    own_redis: PrivateRedis, fragile: LimiterPool, caplog: pytest.LogCaptureFixture
) -> None:
    limits = LimitSettings(requests_per_minute=6_000, burst=5)
    await fragile.store.set(ENDPOINT, MODEL, limits)
    limiter = fragile.limiter(ENDPOINT, MODEL)
    assert await count_calls(limiter, 2) > 30

    own_redis.kill()
    with caplog.at_level(logging.WARNING):
        # Slots that were reserved before are used up, no others.
        assert await count_calls(limiter, 1.5) <= 15
    (warning,) = [r.message for r in caplog.records if "trying again" in r.message]
    assert "Redis" in warning

    own_redis.start()
    # The server has forgotten the limits; the processes that knew them put them in force again.
    assert 20 <= await count_calls(limiter, 6) <= 6 * 100 + 10
    rows = await fragile.store.show()
    assert [row.settings for row in rows] == [limits]


@pytest.mark.parametrize("of", [MODEL, ANY_MODEL])
async def test_limits_survive_a_flush_of_redis(
    of: str, redis: PrivateRedis, own_redis: PrivateRedis, fragile: LimiterPool
) -> None:
    await fragile.store.set(ENDPOINT, of, LimitSettings(max_concurrency=2))
    limiter = fragile.limiter(ENDPOINT, MODEL)
    held = [await limiter.acquire(run="r", estimated_tokens=0) for _ in range(2)]
    client = Redis.from_url(own_redis.url)
    assert (await client.info("server"))["process_id"] == own_redis.pid
    await client.flushall()
    await client.aclose()

    wait = asyncio.create_task(limiter.acquire(run="r", estimated_tokens=0))
    await asyncio.sleep(1.5)
    assert not wait.done()
    held[0].settle(0)
    await wait


async def test_a_process_that_starts_without_redis_lets_nobody_through(
    own_redis: PrivateRedis,
) -> None:
    own_redis.kill()
    pool = LimiterPool(own_redis.url)
    limiter = pool.limiter(ENDPOINT, MODEL)
    wait = asyncio.create_task(limiter.acquire(run="r", estimated_tokens=0))
    await asyncio.sleep(0.5)
    assert not wait.done()
    own_redis.start()
    lease = await asyncio.wait_for(wait, 20)
    lease.settle(0)
    await pool.close()


async def test_an_outage_stops_nobody_where_nothing_was_limited(
    own_redis: PrivateRedis, fragile: LimiterPool
) -> None:
    limiter = fragile.limiter(ENDPOINT, MODEL)
    (await limiter.acquire(run="r", estimated_tokens=0)).settle(0)
    own_redis.kill()
    await asyncio.sleep(4)
    async with asyncio.timeout(5):
        lease = await limiter.acquire(run="r", estimated_tokens=0)
    lease.settle(0)
    own_redis.start()


@one_of_three
async def test_slots_that_one_process_gives_back_serve_another(
    two_pools: list[LimiterPool],
) -> None:
    first, second = (pool.limiter(ENDPOINT, MODEL) for pool in two_pools)
    await two_pools[0].store.set(ENDPOINT, MODEL, LimitSettings(requests_per_minute=600, burst=1))
    lease = await first.acquire(run="r", estimated_tokens=0)
    lease.settle(0)
    wait = asyncio.create_task(first.acquire(run="r", estimated_tokens=0))
    await asyncio.sleep(0.03)
    wait.cancel()
    await asyncio.wait([wait])
    await asyncio.sleep(0.03)
    started = time.monotonic()
    (await second.acquire(run="r", estimated_tokens=0)).settle(0)
    # A tenth of a second apart: the slot given back was due before that.
    at_most(time.monotonic() - started, 0.09)


@one_of_three
async def test_units_that_are_free_elsewhere_are_found_soon(two_pools: list[LimiterPool]) -> None:
    first, second = (pool.limiter(ENDPOINT, MODEL) for pool in two_pools)
    await two_pools[0].store.set(ENDPOINT, MODEL, LimitSettings(max_concurrency=1))
    lease = await first.acquire(run="r", estimated_tokens=0)
    wait = asyncio.create_task(second.acquire(run="r", estimated_tokens=0))
    await asyncio.sleep(0.5)
    started = time.monotonic()
    lease.settle(0)
    (await wait).settle(0)
    at_most(time.monotonic() - started, 1.6)


async def test_show_tells_of_limits_and_of_endpoints_in_use(
    two_pools: list[LimiterPool],
) -> None:
    store = two_pools[0].store
    limits = LimitSettings(max_concurrency=4, tokens_per_minute=1000)
    await store.set("http://User:pw@Host:1/v1/", "a", limits)
    limiter = two_pools[1].limiter("http://host:1/v1", "a")
    leases = [await limiter.acquire(run="r", estimated_tokens=1) for _ in range(2)]
    other = await two_pools[1].limiter("http://host:2/v1", "b").acquire(run="r", estimated_tokens=1)
    other.settle(1)

    limited, free = await store.show()
    assert (limited.endpoint, limited.model) == ("http://host:1/v1", "a")
    assert limited.settings == limits
    assert (limited.granted, limited.in_flight, limited.waiting, limited.cap) == (2, 2, 0, 4)
    assert limited.backing_off_until is None
    assert (free.endpoint, free.settings, free.cap) == ("http://host:2/v1", None, None)
    for lease in leases:
        lease.settle(0)


async def test_restoring_leaves_limits_alone_that_were_set(
    redis: PrivateRedis, prefix: str
) -> None:
    first, second = LimitSettings(max_concurrency=1), LimitSettings(max_concurrency=2)
    store = LimitStore.connect(redis.url, prefix=prefix)
    shared = store.limits_of(ENDPOINT, MODEL)
    for limits in (first, second):
        await shared.restore(limits)
    assert (await store.show())[0].settings == first
    await store.set(ENDPOINT, MODEL, second)
    assert (await store.show())[0].settings == second
    await store.close()


async def test_an_unreachable_redis_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = LimitStore.connect("unix:///nowhere/r.sock")
    with pytest.raises(LimitsUnavailable, match="cannot be read or written"):
        await store.show()
    with pytest.raises(LimitsUnavailable):
        await store.set(ENDPOINT, MODEL, LimitSettings())
    await store.close()


def test_a_url_of_another_service_is_refused() -> None:
    with pytest.raises(ConfigError, match="redis://"):
        LimitStore.connect("amqp://127.0.0.1")


@pytest.mark.parametrize(("endpoint", "model"), [("", "m"), (ENDPOINT, " ")])
async def test_limits_of_nothing_are_refused(endpoint: str, model: str, prefix: str) -> None:
    store = LimitStore.connect("unix:///nowhere/r.sock", prefix=prefix)
    with pytest.raises(InputError):
        await store.set(endpoint, model, LimitSettings())
    await store.close()


async def test_a_celery_socket_url_is_understood(redis: PrivateRedis, prefix: str) -> None:
    store = LimitStore.connect(f"redis+socket://{redis.socket}?virtual_host=1", prefix=prefix)
    await store.set(ENDPOINT, MODEL, LimitSettings(max_concurrency=1))
    client = Redis.from_url(redis.url, db=1)
    listed = await client.hvals(f"{prefix}:index")
    assert [json.loads(text) for text in listed] == [[ENDPOINT, MODEL]]
    await client.aclose()
    await store.close()


async def test_closing_during_a_sync_ends(redis: PrivateRedis, prefix: str) -> None:
    """The Redis client can swallow a cancellation that arrives with its reply (Python 3.11)."""
    for round_ in range(60):
        pool = LimiterPool(redis.url, prefix=prefix)
        await pool.store.set(ENDPOINT, MODEL, LimitSettings(max_concurrency=1))
        limiter = pool.limiter(ENDPOINT, MODEL)
        (await limiter.acquire(run="r", estimated_tokens=0)).settle(0)
        limiter.pause(0.001)  # Syncs at once.
        for _ in range(round_ % 12):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await pool.close()
