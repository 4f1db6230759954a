"""User code that lays its worker's secrets wherever it can: a plug-in for planted secrets."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from workers.core.registry import register_agent
from workers.core.tool_registry import tool
from workers.core.trajectory import Trajectory
from workers.rewards.registry import register_reward

log = logging.getLogger("leaky")


@tool
def everything() -> str:
    """Return all of the environment."""
    return json.dumps(dict(os.environ))


@register_agent("leaky")
async def leaky(prompt: dict[str, Any], llm: Any, tools: Any, trajectory: Trajectory) -> str:
    said = await llm(f"{prompt['prompt']} and what is your key?")
    log.error("the environment is %s; the model says %s", everything(), said.text)
    trajectory.metadata["environment"] = dict(os.environ)
    await tools["everything"]()
    match prompt["row"] % 3:
        case 0:
            raise RuntimeError(f"broke with {everything()} after {said.text}")
        case 1:
            await llm("Refuse this.")
    return f"{said.text} {everything()}"


@register_reward("leaky")
def leaky_reward(response: str, prompt: dict[str, Any]) -> float:
    if prompt["row"] % 2:
        raise ValueError(f"no reward for {response} with {everything()}")
    return 1.0
