"""The workers' plug-in: an agent and a reward that record executions in a history.

`rollout worker --plugin` loads it. The agent is the library's `react`, with a history entry before
and after. The field `harm` of a prompt names the damage to its worker. Must not: call the pipeline.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.faults.histories import History, rollout_of
from benchmarks.mock_answers import FINAL_ANSWER
from workers.agents.react_agent import ReActAgent
from workers.core.registry import register_agent
from workers.core.trajectory import Trajectory
from workers.rewards.registry import register_reward
from workers.rewards.reward_result import RewardResult

NAME = "witnessed"
ACTOR = "worker"

#: Key of a trajectory's metadata: a random number of the execution that wrote it.
EXECUTION = "execution"
#: Name of the reward part with the same number, as it is stored.
EXECUTION_PART = f"{NAME}.{EXECUTION}"

_CHECK_EVERY_S = 0.05


@cache
def _history() -> History:
    return History.of_environment(ACTOR)


@register_agent(NAME)
class WitnessedAgent(ReActAgent):
    """Records each attempt's start and end."""

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Run one prompt, after the damage to its worker, if the prompt names one."""
        _history().note("start", label=request_id, pid=os.getpid())
        _harm_worker(prompt, request_id)
        try:
            await _pass_gate(prompt)
            trajectory = await super().run_trajectory(
                prompt, llm_generate_func, request_id, **kwargs
            )
        except BaseException as error:
            _history().note("broken", label=request_id, error=repr(error))
            raise
        trajectory.metadata[EXECUTION] = execution = secrets.randbits(31)
        _history().note(
            "end",
            label=request_id,
            answer=trajectory.get_final_response(),
            execution=execution,
        )
        return trajectory


@register_reward(NAME, inline=True)
def witnessed_reward(response: str, trajectory: Trajectory) -> RewardResult:
    """Score a correct answer by a hash of the rollout's name, to detect swapped outcomes.

    The execution is a part, to detect a reward that is stored with another execution's trajectory.
    """
    is_right = response.strip() == FINAL_ANSWER
    value = expected_reward(rollout_of(trajectory.request_id)) if is_right else -1.0
    return RewardResult(value, {EXECUTION: trajectory.metadata.get(EXECUTION, 0)})


def expected_reward(rollout: str) -> float:
    """Return the reward that a rollout of this name must get."""
    return blake2b(rollout.encode(), digest_size=1).digest()[0] / 256


async def _pass_gate(prompt: dict[str, Any]) -> None:
    """Wait for the file in the prompt, so that rollouts run until the fault is injected."""
    gate = prompt.get("gate")
    while gate and not Path(gate).exists():
        await asyncio.sleep(_CHECK_EVERY_S)


def _harm_worker(prompt: dict[str, Any], label: str) -> None:
    harm = prompt.get("harm")
    if harm == "kill_worker" and "-r0-" in label:
        os.kill(os.getpid(), signal.SIGKILL)
    if harm == "block_loop" and label.endswith("-r0-a1"):
        time.sleep(prompt["harm_s"])
