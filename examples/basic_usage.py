"""The basics: one question, a question that needs a tool, and the contents of a trajectory.

python examples/basic_usage.py
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from scripted_policy import open_llm

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig
from workers.core.trajectory import Trajectory

SCRIPT = {
    "15 * 24": [
        "Thought: I multiply.\nAction: calculator(expression='15 * 24')",
        "Thought: The tool says 360.\nFinal Answer: 360",
    ],
    "": ["Thought: I know this one.\nFinal Answer: Paris"],
}


async def ask_without_tools(llm) -> None:
    """One question, one answer."""
    rollout = AgenticRollout(AgenticRolloutConfig(agent_type="react"), llm)
    trajectory = await rollout.agent.run_trajectory(
        prompt={"content": "What is the capital of France?"},
        llm_generate_func=llm,
        request_id="capital",
    )
    print(f"Answer: {trajectory.get_final_response()}")


async def ask_with_a_tool(llm, folder: Path) -> Trajectory:
    """A question for the calculator; the trajectory is saved."""
    config = AgenticRolloutConfig(
        agent_type="react",
        max_steps=10,
        temperature=0.0,
        tools_config={"calculator": {"precision": 10}},
        save_trajectories=True,
        trajectory_save_path=folder,
    )
    rollout = AgenticRollout(config, llm)
    return await rollout.agent.run_trajectory(
        prompt={"content": "What is 15 * 24?"}, llm_generate_func=llm, request_id="product"
    )


def show(trajectory: Trajectory) -> None:
    """Print the steps and the answer."""
    for step in trajectory.steps:
        print(f"  {step.step_type.value:13} {step.content}")
    print(f"Answer: {trajectory.get_final_response()}")
    print(f"Stopped because: {trajectory.metadata['stop_reason']}")
    print(f"Tool calls: {len(trajectory.get_tool_calls())}, tokens: {trajectory.total_tokens}")


async def main() -> None:
    async with open_llm(SCRIPT) as llm:
        await ask_without_tools(llm)
        with tempfile.TemporaryDirectory() as folder:
            trajectory = await ask_with_a_tool(llm, Path(folder))
            show(trajectory)
            saved = json.loads((Path(folder) / "product.json").read_text())
            print(f"Read back as it was: {Trajectory.from_dict(saved) == trajectory}")


if __name__ == "__main__":
    asyncio.run(main())
