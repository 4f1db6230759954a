"""Reward functions by name: registering, finding, and scoring one trajectory with them.

Plug-in modules register; `workers/process/execution.py` scores. A run names its reward, and the
worker looks the name up here. Must not turn an error into a value, or know a queue or a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, TypeVar

from pipeline.contract.errors import ContractError, RewardError, SandboxError, boundary
from workers.core.sync_call import call_sync_or_async
from workers.rewards.reward_function import RewardFunction, RunsIn, inspect_reward
from workers.rewards.reward_processes import call_in_process
from workers.rewards.reward_result import RewardResult, read_result
from workers.sandbox.base import SandboxFailure

DEFAULT_TIMEOUT_S = 60.0
#: Name → module; each registers the name when it is imported, on first use.
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
# Apart from the others, because a module is imported once and `clear_rewards` would lose them.
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

    It may take by name `response` (the final answer's text), `answer` (the prompt's field
    `answer`, or None), `prompt` (its payload), `trajectory`; further parameters with a default
    are options of the run's reward config. `read_result` says which values it may return.

    Args:
        name: The reward's name in a run's configuration.
        inline: Sync and cheap: called in the event loop itself instead of a thread.
        process: Heavy on the CPU, or able to hang: called in a process, killed when out of time.
        bounds_itself: It has a time limit of its own, which does not count a wait for its turn.
        version: Stored with every value, so that rewards of changed functions are told apart.

    Raises:
        ValueError: The name is taken.
        TypeError: The function takes something that is not known.
    """

    def register(function: FunctionT) -> FunctionT:
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
        ContractError: No reward of that name; code `unknown_reward`.
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
    """Return all names, built-in ones included, sorted."""
    return sorted({*_registered, *BUILTIN_REWARDS})


def clear_rewards() -> None:
    """Forget every reward but the built-in ones."""
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

    A sync function that is out of time goes on in its thread, and its value is dropped; with
    `process=True` its process is killed.

    Raises:
        ContractError: Unknown name or option, or a value of a wrong type.
        RewardError: It raised, ran out of time (`reward_timeout`), or gave no finite number.
        SandboxError: The sandbox it runs in would not start, or died.
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
            # Inside, so that a TimeoutError of the function's own is its error and not ours.
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
        # Not the scorer's fault: the attempt is retried, and no score is stored.
        raise SandboxError(str(error)) from error
