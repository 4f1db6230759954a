from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from slow_rewards import (
    async_one,
    burns,
    dies,
    exits,
    pid_of,
    raises,
    sleeps_then_pid,
    unpicklable,
)

from pipeline.contract.errors import ContractError, RewardError
from workers.rewards.registry import clear_rewards, register_reward, score
from workers.rewards.reward_processes import close_reward_processes


@pytest.fixture(autouse=True)
async def _ended() -> AsyncIterator[None]:
    yield
    clear_rewards()
    await close_reward_processes()


async def score_in_process(function: Any, **options: Any) -> Any:
    clear_rewards()
    register_reward("mine", process=True)(function)
    return await score("mine", response="x", prompt={"answer": "2"}, **options)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_reward_runs_in_another_process_which_is_used_again() -> None:
    first = await score_in_process(pid_of)
    second = await score_in_process(pid_of)
    assert first.value == 1.0
    assert first.parts["pid"] == second.parts["pid"] != os.getpid()
    assert (await score_in_process(async_one)).value == 2.0


async def test_a_reward_that_burns_the_cpu_is_killed_and_the_next_one_works() -> None:
    with pytest.raises(RewardError) as caught:
        await score_in_process(burns, timeout_s=1.0)
    assert caught.value.code == "reward_timeout"
    assert (await score_in_process(async_one)).value == 2.0


@pytest.mark.parametrize(
    ("function", "says", "code"),
    [
        (raises, "ValueError: bad x", "reward_raised"),
        (exits, "SystemExit: 0", "reward_raised"),
        (dies, "ended with code 7", "reward_process_died"),
        (unpicklable, "returned a function that cannot be pickled", "reward_raised"),
    ],
)
async def test_whatever_a_reward_does_is_its_own_error(function: Any, says: str, code: str) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        await score_in_process(function)
    assert caught.value.code == code
    assert (await score_in_process(async_one)).value == 2.0


async def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ContractError, match="at the top of a module") as caught:
        await score_in_process(lambda response: 1.0)
    assert caught.value.code == "reward_not_importable"


async def test_there_are_no_more_processes_than_cores_and_closing_ends_them() -> None:
    register_reward("mine", process=True)(sleeps_then_pid)
    results = await asyncio.gather(
        *(score("mine", response="x", prompt={}) for _ in range(3 * (os.cpu_count() or 1)))
    )
    pids = {int(result.parts["pid"]) for result in results}
    assert len(pids) <= (os.cpu_count() or 1)
    await close_reward_processes()
    assert not [pid for pid in pids if is_running(pid)]


def test_it_works_on_a_uvloop_beside_the_main_thread() -> None:
    values: list[float] = []

    async def both() -> None:
        values.append((await score_in_process(async_one)).value)
        await close_reward_processes()

    thread = threading.Thread(target=lambda: uvloop.run(both()))
    thread.start()
    thread.join(30)
    assert values == [2.0]
