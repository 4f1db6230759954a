"""Check a rollout from the question to the saved trajectory.

    python examples/test_agentic_rollout.py

The answers always come from a script; exit code 1 if a check fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from scripted_policy import ScriptedPolicy, call_tool

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.core.trajectory import Trajectory

LLM = ScriptedPolicy(
    {
        "144": ["Thought: root\nAction: calculator(expression='sqrt(144)')", "Final Answer: 12"],
        "native": [call_tool("calculator", '{"expression": "2 ** 10"}'), "1024"],
        "": ["Final Answer: yes"],
    }
)


async def react_uses_its_tool() -> bool:
    rollout = AgenticRollout(AgenticRolloutConfig(tools_config={"calculator": {}}), LLM)
    (trajectory,) = await rollout.run_batch(["The square root of 144?"])
    used = trajectory.metadata["tools"] == {"calculator": {"calls": 1, "errors": 0}}
    return used and trajectory.get_final_response() == "12"


async def tool_agent_makes_native_calls() -> bool:
    config = AgenticRolloutConfig(agent_type="tool", tools_config=["calculator"])
    (trajectory,) = await AgenticRollout(config, LLM).run_batch(["native: 2 to the 10th"])
    return trajectory.get_final_response() == "1024"


async def batches_keep_their_order() -> bool:
    rollout = AgenticRollout(AgenticRolloutConfig(tools_config=["calculator"]), LLM)
    answers = await rollout.run_batch(["Root of 144?", "Is it?", "Root of 144?"])
    return [t.get_final_response() for t in answers] == ["12", "yes", "12"]


async def saved_trajectories_are_read_back() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        config = AgenticRolloutConfig(save_trajectories=True, trajectory_save_path=folder)
        trajectories = await AgenticRollout(config, LLM).run_batch(["Is it?"])
        saved = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
        return [Trajectory.from_dict(data) for data in saved] == trajectories


CHECKS = (
    react_uses_its_tool,
    tool_agent_makes_native_calls,
    batches_keep_their_order,
    saved_trajectories_are_read_back,
)


def run(checks) -> int:
    """Run the checks, print one line for each, and return the number of failures."""
    failed = 0
    for check in checks:
        passed = asyncio.run(check())
        failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {check.__name__.replace('_', ' ')}")
    return failed


if __name__ == "__main__":
    sys.exit(1 if run(CHECKS) else 0)
