"""Reward functions by name: registering, finding, and scoring one trajectory with them.

Plug-in modules register functions, and `workers/process/execution.py` scores with them. A run names
its reward; the worker finds it here. Must not turn an error into a value, or know a queue or store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, TypeVar

from pipeline.contract.errors import ContractError, RewardError, SandboxError, boundary
from pipeline.contract.names import check_name
from workers.core.sync_call import call_sync_or_async
from workers.rewards.reward_function import RewardFunction, RunsIn, inspect_reward
from workers.rewards.reward_processes import call_in_process
from workers.rewards.reward_result import RewardResult, read_result
from workers.sandbox.base import SandboxFailure

DEFAULT_TIMEOUT_S = 60.0
#: Name → module. A module registers its names when it is imported, at the first use of one.
BUILTIN_REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "exact_match": "workers.rewards.answer_rewards",
        "numeric": "workers.rewards.answer_rewards",
        "gsm8k": "workers.rewards.answer_rewards",
        "python_tests": "workers.rewards.python_tests",
    }
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_registered: dict[str, RewardFunction] = {}
# Kept separately: `clear_rewards` must not remove them, because their modules are imported only
# once and would not register them again.
_builtin: dict[str, RewardFunction] = {}


def register_reward(
    name: str,
    *,
    inline: bool = False,
    process: bool = False,
    bounds_itself: bool = False,
    version: str = "1",
) -> Callable[[FunctionT], FunctionT]:
    """Register a function, an object with `__call__`, or a class of such objects, as a reward.

    The function may take by name `response` (the final answer's text), `answer` (the prompt's field
    `answer`, or None), `prompt` (its payload) and `trajectory`. Further parameters with a default
    are options of the run's reward config. `read_result` lists the allowed return values.

    Args:
        name: The reward's name in a run's configuration.
        inline: For a cheap sync function: call it in the event loop instead of a thread.
        process: For a CPU-bound function, or one that may hang: call it in a process, which is
            killed at the time limit.
        bounds_itself: The function has its own time limit, which excludes waits for a slot.
        version: Stored with every value, to distinguish the rewards of changed functions.

    Raises:
        ValueError: Another reward has this name, or name or version is too long.
        TypeError: The function takes an unknown parameter without a default.
    """

    def register(function: FunctionT) -> FunctionT:
        check_name(name, "reward")
        check_name(version, f"version of reward {name!r}")
        is_builtin = getattr(function, "__module__", None) == BUILTIN_REWARDS.get(name)
        if name in _registered or (name in BUILTIN_REWARDS and not is_builtin):
            raise ValueError(f"A reward named {name!r} is registered already.")
        (_builtin if is_builtin else _registered)[name] = inspect_reward(
            name,
            function,
            version=version,
            inline=inline,
            process=process,
            bounds_itself=bounds_itself,
        )
        return function

    return register


def get_reward(name: str) -> RewardFunction:
    """Return the reward of this name; a built-in one is imported on first use.

    Raises:
        ContractError: No reward has that name; code `unknown_reward`.
    """
    reward = _registered.get(name) or _builtin.get(name)
    if reward is None and name in BUILTIN_REWARDS:
        import_module(BUILTIN_REWARDS[name])
        reward = _builtin.get(name)
    if reward is None:
        raise ContractError(
            f"No reward is named {name!r}. This worker knows {', '.join(list_rewards())}; a module "
            "with others must be among the worker's plug-ins.",
            code="unknown_reward",
        )
    return reward


def list_rewards() -> list[str]:
    """Return the names of all rewards, including built-in ones, sorted."""
    return sorted({*_registered, *BUILTIN_REWARDS})


def clear_rewards() -> None:
    """Remove every reward except the built-in ones."""
    _registered.clear()


async def score(
    name: str,
    *,
    response: str,
    prompt: Mapping[str, Any],
    trajectory: Any = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    config: Mapping[str, Any] | None = None,
) -> RewardResult:
    """Score one trajectory.

    A sync function that exceeds the time limit goes on in its thread, and its value is dropped.
    With `process=True` its process is killed.

    Raises:
        ContractError: Unknown name or option, or a value of a wrong type.
        RewardError: The function raised, exceeded the time limit (`reward_timeout`), or returned no
            finite number.
        SandboxError: The function's sandbox did not start, or died.
    """
    reward = get_reward(name)
    values = {
        "response": response,
        "answer": prompt.get("answer"),
        "prompt": prompt,
        "trajectory": trajectory,
    }
    arguments = reward.arguments(values, config)
    try:
        async with asyncio.timeout(None if reward.bounds_itself else timeout_s):
            # Inside the timeout, so that a TimeoutError of the function counts as its own error.
            with boundary(RewardError):
                value = await _call(reward, arguments)
    except TimeoutError:
        raise RewardError(
            f"Reward {name!r} gave no value within {timeout_s:g} s.", code="reward_timeout"
        ) from None
    return read_result(value, name)


async def _call(reward: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        if reward.runs_in is RunsIn.PROCESS:
            return await call_in_process(reward.function, arguments)
        if reward.runs_in is RunsIn.THREAD:
            return await call_sync_or_async(reward.function, **arguments)
        value = reward.function(**arguments)
        return await value if isawaitable(value) else value
    except SandboxFailure as error:
        # The function is not the cause: the attempt is retried, and no score is stored.
        raise SandboxError(str(error)) from error
