"""Interactions: simulated users or checkers that reply to a final answer, so the agent continues.

An interaction is an object with verl's methods (`generate_response`, optionally
`start_interaction` and `finalize_interaction`) or a function of the trajectory that returns text or
None. The agents call them after each final answer. Must not: catch an exception of an interaction,
because a failed environment fails the rollout.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from workers.core.sync_call import call_sync_or_async
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

log = logging.getLogger(__name__)


async def respond_to_answer(interactions: Mapping[str, Any], trajectory: Trajectory) -> bool:
    """Ask the interactions for a reply to the last final answer; return whether one replied.

    The answer then becomes a thought, and the reply an observation. The score of an interaction
    becomes the reward of the answer's step.
    """
    answer = trajectory.steps[-1]
    for name, interaction in interactions.items():
        text, score = await _response_of(name, interaction, trajectory)
        if score is not None:
            answer.reward_score = score
        if text is not None:
            answer.step_type = StepType.THOUGHT
            answer.metadata["answered_by"] = name
            trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, text, {"interaction": name}))
            return True
    return False


@asynccontextmanager
async def interacting(
    interactions: Mapping[str, Any], trajectory: Trajectory
) -> AsyncIterator[None]:
    """Finalize the interactions that the trajectory used, however the block ends.

    After an error the error stays the outcome, and a failure to finalize is logged.
    """
    try:
        yield
    except BaseException:
        try:
            await _finalize(interactions, trajectory)
        except Exception:
            log.warning("An interaction could not be finalized.", exc_info=True)
        raise
    await _finalize(interactions, trajectory)


def create_interactions(interactions_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return interactions by name.

    Args:
        interactions_config: Name to an object or function, or to `{"class": "module:Class",
            "config": {...}}`.

    Raises:
        ValueError: An entry is none of these.
    """
    return {name: _made(name, value) for name, value in (interactions_config or {}).items()}


def _made(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        if callable(value) or hasattr(value, "generate_response"):
            return value
    elif isinstance(path := value.get("class"), type):
        return path(value.get("config", {}))
    elif isinstance(path, str) and ":" in path:
        return pkgutil.resolve_name(path)(value.get("config", {}))
    raise ValueError(
        f"interaction {name!r} is {value!r}; expected an object with generate_response, "
        'a function, or {"class": "module:Class", "config": {...}}'
    )


async def _finalize(interactions: Mapping[str, Any], trajectory: Trajectory) -> None:
    for name in trajectory.metadata.get("interactions", {}):
        finalize = getattr(interactions.get(name), "finalize_interaction", None)
        if finalize:
            await call_sync_or_async(finalize, trajectory.request_id)


async def _response_of(
    name: str, interaction: Any, trajectory: Trajectory
) -> tuple[str | None, float | None]:
    turns = trajectory.metadata.setdefault("interactions", {})
    is_first, turns[name] = name not in turns, turns.get(name, 0) + 1
    generate = getattr(interaction, "generate_response", None)
    if generate is None:
        returned = await call_sync_or_async(interaction, trajectory)
        return (None if returned is None else str(returned)), None
    if is_first and (start := getattr(interaction, "start_interaction", None)):
        await call_sync_or_async(start, trajectory.request_id)
    returned = await call_sync_or_async(generate, trajectory.request_id, trajectory.get_messages())
    is_over, text, score, *_ = (*returned, None, None)
    return (None if is_over or not text else str(text)), score
