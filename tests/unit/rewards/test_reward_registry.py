from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.contract.errors import ContractError, ErrorClass, RewardError, RolloutError
from workers.rewards.registry import (
    BUILTIN_REWARDS,
    clear_rewards,
    get_reward,
    list_rewards,
    register_reward,
    score,
)
from workers.rewards.reward_function import RunsIn
from workers.rewards.reward_result import RewardResult

PROMPT = {"question": "6 * 7?", "answer": "42"}


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    clear_rewards()


async def score_with(function: Any, **options: Any) -> RewardResult:
    scoring = {key: options.pop(key) for key in ("config", "timeout_s") if key in options}
    register_reward("mine", **options)(function)
    return await score("mine", response="42", prompt=PROMPT, trajectory="T", **scoring)


async def test_a_function_gets_by_name_what_it_takes() -> None:
    taken: dict[str, Any] = {}

    def one(response: str, answer: str) -> float:
        taken["one"] = (response, answer)
        return 1

    async def two(*, prompt: dict[str, Any], trajectory: Any) -> float:
        taken["two"] = (prompt, trajectory)
        return 2

    def none() -> float:
        return 3

    for number, function in enumerate((one, two, none), start=1):
        assert await score_with(function) == RewardResult(number)
        clear_rewards()
    assert taken == {"one": ("42", "42"), "two": (PROMPT, "T")}


async def test_an_agentcore_style_reward_object_or_class_is_a_reward() -> None:
    class GSM8KReward:
        def __call__(self, **kwargs: Any) -> list[float]:
            return [float(kwargs["response_text"] == kwargs["ground_truth"])]

    for registered in (GSM8KReward(), GSM8KReward):
        assert await score_with(registered) == RewardResult(1.0)
        clear_rewards()


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (0, RewardResult(0.0)),
        (True, RewardResult(1.0)),
        (RewardResult(0.5, {"format": 1}), RewardResult(0.5, {"format": 1.0})),
        ({"reward": 0.5, "format": True}, RewardResult(0.5, {"format": 1.0})),
        ([0.25, 0.5], RewardResult(0.75, {"turn_0": 0.25, "turn_1": 0.5})),
    ],
)
async def test_a_value_is_read_in_all_its_forms(value: Any, result: RewardResult) -> None:
    read = await score_with(lambda: value)
    assert read == result
    assert type(read.value) is float


class ArrayOf:
    """Looks like an array of numpy or torch."""

    def __init__(self, ndim: int, value: Any) -> None:
        self.ndim = ndim
        self.value = value

    def item(self) -> Any:
        return self.value


async def test_a_scalar_of_an_array_library_is_a_number_and_an_array_is_not() -> None:
    assert await score_with(lambda: ArrayOf(0, 0.5)) == RewardResult(0.5)
    clear_rewards()
    with pytest.raises(ContractError):
        await score_with(lambda: ArrayOf(1, 0.5))


@pytest.mark.parametrize(
    ("value", "error", "code"),
    [
        (None, ContractError, "reward_type"),
        ("1.0", ContractError, "reward_type"),
        ({"score": 1}, ContractError, "reward_type"),
        ([], ContractError, "reward_type"),
        (1j, ContractError, "reward_type"),
        (RewardResult(1.0, {"format": "good"}), ContractError, "reward_type"),  # type: ignore[dict-item]
        (math.nan, RewardError, "not_finite"),
        (-math.inf, RewardError, "not_finite"),
        (10**400, RewardError, "not_finite"),
        ({"reward": 1, "format": math.nan}, RewardError, "not_finite"),
    ],
)
async def test_a_value_that_is_no_finite_number_is_an_error(
    value: Any, error: type[RolloutError], code: str
) -> None:
    with pytest.raises(error, match="mine") as caught:
        await score_with(lambda: value)
    assert caught.value.code == code


async def test_what_a_reward_raises_is_a_reward_error() -> None:
    def broken(response: str) -> float:
        raise KeyError(response)

    with pytest.raises(RewardError, match="KeyError: '42'") as caught:
        await score_with(broken)
    assert caught.value.error_class is ErrorClass.REWARD_ERROR
    assert caught.value.code == "reward_raised"
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_timeout_of_the_functions_own_is_its_error() -> None:
    async def judge() -> float:
        raise TimeoutError("judge")

    with pytest.raises(RewardError, match="judge") as caught:
        await score_with(judge)
    assert caught.value.code == "reward_raised"


async def test_a_reward_that_is_out_of_time_is_a_timeout() -> None:
    async def slow() -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match=r"within 0\.01 s") as caught:
        await score_with(slow, timeout_s=0.01)
    assert caught.value.code == "reward_timeout"


async def test_a_sync_reward_that_hangs_neither_blocks_the_loop_nor_the_score() -> None:
    release = threading.Event()

    def hangs() -> float:
        release.wait(30)
        return 1.0

    started = time.perf_counter()
    with pytest.raises(RewardError):
        await score_with(hangs, timeout_s=0.05)
    release.set()
    assert time.perf_counter() - started < 5


async def test_cancelling_a_score_passes_through() -> None:
    async def slow() -> float:
        await asyncio.Event().wait()
        return 1.0

    task = asyncio.create_task(score_with(slow))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_inline_reward_runs_in_the_loops_thread() -> None:
    threads: list[int] = []

    def noted() -> float:
        threads.append(threading.get_ident())
        return 1.0

    await score_with(noted, inline=True)
    clear_rewards()
    await score_with(noted)
    assert threads[0] == threading.get_ident() != threads[1]


async def test_options_come_from_the_config_and_unknown_ones_are_refused() -> None:
    def graded(response: str, *, weight: float = 1.0) -> float:
        return weight

    assert await score_with(graded, config={"weight": 0.25}) == RewardResult(0.25)
    with pytest.raises(ContractError, match="Did you mean 'weight'"):
        await score("mine", response="", prompt={}, config={"wieght": 1})


def test_what_a_function_takes_is_checked_when_it_is_registered() -> None:
    def strange(completion: str) -> float:
        return 1.0

    with pytest.raises(TypeError, match="takes 'completion', which is not known"):
        register_reward("mine")(strange)
    with pytest.raises(TypeError, match="cannot be called"):
        register_reward("mine")("gsm8k")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="both inline and in a process"):
        register_reward("mine", inline=True, process=True)(lambda: 1.0)


def test_a_name_is_registered_once() -> None:
    register_reward("mine")(lambda: 1.0)
    for name in ("mine", "gsm8k"):
        with pytest.raises(ValueError, match="registered already"):
            register_reward(name)(lambda: 1.0)


@pytest.mark.parametrize("names", [{"name": "x" * 201}, {"name": "x", "version": "1" * 201}])
def test_a_name_that_cannot_be_stored_is_not_registered(names: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="201 characters; at most 200"):
        register_reward(**names)(lambda response: 1.0)


async def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ContractError, match="exact_match, gsm8k") as caught:
        await score("nope", response="", prompt={})
    assert caught.value.code == "unknown_reward"


@pytest.mark.parametrize("name", ["exact_match", "numeric", "gsm8k"])
async def test_built_in_rewards_are_found_by_name_and_survive_clearing(name: str) -> None:
    assert name in list_rewards()
    assert name in BUILTIN_REWARDS
    clear_rewards()
    assert get_reward(name).runs_in is RunsIn.LOOP
    assert (await score(name, response="42", prompt=PROMPT)).value == 1.0
