"""Servers, pools and fleets of the limit tests."""

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from clocked_limits import Clock, ClockedLimits
from fixtures.short_folders import short_folder
from redis.asyncio import Redis

from benchmarks.limit_fleet import Fleet, PrivateRedis
from pipeline.embedded.redis_programs import find_program
from pipeline.limits.pool import LimiterPool
from pipeline.limits.status import ANY_MODEL
from pipeline.limits.store import LimitStore


@pytest.fixture(scope="session")
def redis() -> Iterator[PrivateRedis]:
    """The server that all tests share; each has keys of its own."""
    with short_folder() as folder:
        server = PrivateRedis(find_program(), folder)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def own_redis() -> Iterator[PrivateRedis]:
    """A server that the test may kill."""
    with short_folder() as folder:
        server = PrivateRedis(find_program(), folder)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def prefix() -> str:
    return f"test-limits-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def pool(redis: PrivateRedis, prefix: str) -> AsyncIterator[LimiterPool]:
    """One process's limiters."""
    pool = LimiterPool(redis.url, prefix=prefix, lease_s=2.0)
    yield pool
    await pool.close()


@pytest.fixture
async def fleet(redis: PrivateRedis, prefix: str) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis.url, prefix, LimitStore.connect(redis.url, prefix=prefix))
    yield fleet
    for process in fleet.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await fleet.store.close()


@pytest.fixture
async def client(redis: PrivateRedis) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis.url)
    yield client
    await client.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def whole(client: Redis, prefix: str, clock: Clock) -> ClockedLimits:
    return ClockedLimits(client, prefix, clock, ANY_MODEL, None)


@pytest.fixture
def limits(client: Redis, prefix: str, clock: Clock, whole: ClockedLimits) -> ClockedLimits:
    return ClockedLimits(client, prefix, clock, "m", whole)
