"""Custom agents, tools and interactions, batches, and the trainer's layout.

python examples/advanced_integration.py
"""

from __future__ import annotations

import asyncio
from typing import Any

from scripted_policy import call_tool, open_llm

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
from workers.core.base_agent import BaseAgent
from workers.core.registry import get_agent_class, register_agent
from workers.core.tool_registry import tool
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

SCRIPT = {
    "weather": [call_tool("forecast", '{"city": "Oslo", "days": 2}'), "Take a coat."],
    "poem": ["Roses are red", "Roses are red, violets are blue"],
    "summary": ["A long text, in short."],
    "": ["Thought: easy\nFinal Answer: 4"],
}


@tool
def forecast(city: str, days: int = 1) -> str:
    """Tell the weather of a city.

    Args:
        city: Name of the city.
        days: How many days ahead.
    """
    return f"{city}: snow for {days} days"


@register_agent("summarize_twice")
async def summarize_twice(prompt: dict[str, Any], llm) -> str:
    """An agent as one function, whose model calls are recorded."""
    first = await llm(f"Write a summary: {prompt['content']}")
    second = await llm(f"Write a shorter summary: {first.text}")
    return second.text


class OneShotAgent(BaseAgent):
    """A custom agent class with its own loop."""

    async def run_trajectory(self, prompt, llm_generate_func, request_id, **kwargs):
        """Ask once and record the reply."""
        trajectory = Trajectory(request_id=request_id)
        trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, prompt["content"]))
        reply = await llm_generate_func(self.format_messages_for_llm(trajectory))
        trajectory.add_step(self.parse_llm_output(reply))
        self.finalize_trajectory(trajectory)
        return trajectory


def wants_two_lines(trajectory: Trajectory) -> str | None:
    """A simulated user that asks for more until the poem has a comma."""
    return None if "," in trajectory.get_final_response() else "Make the poem longer."


class Characters:
    """The smallest possible tokenizer; use that of your model instead."""

    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        """One token per character."""
        return [ord(char) for char in text]


async def use_a_decorated_tool(llm) -> None:
    config = AgenticRolloutConfig(agent_type="tool", tools_config=["forecast"])
    (trajectory,) = await AgenticRollout(config, llm).run_batch(["What is the weather in Oslo?"])
    print(f"tool: {trajectory.get_final_response()} {trajectory.metadata.get('tools', {})}")


async def use_own_agents(llm) -> None:
    function_agent = get_agent_class("summarize_twice")()
    trajectory = await function_agent.run_trajectory({"content": "a long text"}, llm, "r1")
    calls = trajectory.metadata["usage"]["model_calls"]
    print(f"function agent: {trajectory.get_final_response()} ({calls} calls)")
    trajectory = await OneShotAgent().run_trajectory({"content": "2 + 2?"}, llm, "r2")
    print(f"agent class: {trajectory.get_final_response()}")


async def let_a_user_answer(llm) -> None:
    config = AgenticRolloutConfig(
        agent_type="single_turn", interactions_config={"reader": wants_two_lines}
    )
    (trajectory,) = await AgenticRollout(config, llm).run_batch(["Write a poem."])
    print(f"interaction: {trajectory.get_final_response()!r}")


async def run_a_batch(llm) -> None:
    async def sometimes_away(messages: list[dict[str, Any]], **options: Any) -> Any:
        if "unlucky" in messages[-1]["content"]:
            raise ConnectionError("the endpoint is away")
        return await llm(messages, **options)

    rollout = create_agentic_rollout(
        {"agent_type": "react", "concurrent_requests": 8}, llm_generate_func=sometimes_away
    )
    trajectories = await rollout.run_batch(["2 + 2?", "an unlucky one", "2 + 2?"])
    for trajectory in trajectories:
        error = trajectory.metadata.get("error", {}).get("message")
        print(f"batch: {trajectory.get_final_response()!r} error={error}")


async def make_training_rows(llm) -> None:
    try:
        import numpy  # noqa: F401
    except ModuleNotFoundError:
        print("training rows: pip install numpy to see them")
        return
    rollout = AgenticRollout(AgenticRolloutConfig(), llm, tokenizer=Characters())
    batch = await rollout.generate_sequences(["2 + 2?"])
    sampled = int(batch.batch["response_mask"].sum())
    print(f"training rows: {sorted(batch.batch)}, {sampled} sampled tokens")


async def main() -> None:
    async with open_llm(SCRIPT) as llm:
        await use_a_decorated_tool(llm)
        await use_own_agents(llm)
        await let_a_user_answer(llm)
        await run_a_batch(llm)
        await make_training_rows(llm)


if __name__ == "__main__":
    asyncio.run(main())
