from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass

from workers.llm import connections
from workers.llm.connections import close_connections, release_connections, shared_connection


@dataclass(eq=False)
class Pool:
    is_closed: bool = False

    async def aclose(self) -> None:
        self.is_closed = True


class User:
    pass


async def test_users_of_one_key_share_and_the_last_one_closes() -> None:
    first, second = User(), User()
    pool = shared_connection(first, "a", Pool)
    assert shared_connection(second, "a", Pool) is pool
    assert shared_connection(first, "b", Pool) is not pool
    await release_connections(first)
    assert not pool.is_closed
    await release_connections(second)
    assert pool.is_closed
    assert shared_connection(first, "a", Pool) is not pool
    await close_connections()


def test_every_event_loop_has_its_own_and_closes_them_at_its_end() -> None:
    user = User()

    async def pool_of_this_loop() -> Pool:
        pool = shared_connection(user, "a", Pool)
        assert not pool.is_closed
        return pool

    pools = [asyncio.run(pool_of_this_loop()) for _ in range(3)]
    assert len(set(map(id, pools))) == 3
    assert all(pool.is_closed for pool in pools)
    assert not [slot for slot in connections._shared if slot[1] == "a"]


def test_a_loop_that_ended_otherwise_is_forgotten() -> None:
    async def connect() -> None:
        shared_connection(User(), "a", Pool)

    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(connect())
        loop.close()
    assert len([slot for slot in connections._shared if slot[1] == "a"]) == 1
    assert len([loop for loop in connections._closers if loop.is_closed()]) == 1
    connections._forget_closed_loops()
    assert not [loop for loop in connections._closers if loop.is_closed()]


def test_providers_and_the_policys_options_load_no_sdk() -> None:
    code = (
        "import sys, workers.llm.providers, workers.offline_policy.policy;"
        "import workers.rewards.registry;"
        "print({'openai', 'anthropic', 'aiohttp', 'uvicorn', 'celery'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
