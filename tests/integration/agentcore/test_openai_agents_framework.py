"""A second framework, added as docs/agentcore.md says: the OpenAI Agents SDK."""

from __future__ import annotations

import pytest
from fixtures.agentcore_apps import ROLLOUT, served
from fixtures.scripted_model import call_tool, scripted_model


def policy(messages):
    if messages[-1]["role"] == "tool":
        return f"#### {messages[-1]['content']}"
    return call_tool("double", {"number": 21})


def test_turns_of_the_openai_agents_sdk_are_collected():
    agents = pytest.importorskip("agents", reason="the extra openai-agents is not installed")
    from workers.agentcore.frameworks.openai_agents.app import OpenAIAgentsRLApp
    from workers.agentcore.frameworks.openai_agents.rollout_collector import (
        OpenAIAgentsRolloutCollector,
    )

    agents.set_tracing_disabled(True)
    app = OpenAIAgentsRLApp()

    @agents.function_tool
    def double(number: int) -> str:
        """Double a number."""
        return str(2 * number)

    async def rollout(payload):
        collector = OpenAIAgentsRolloutCollector()
        agent = agents.Agent(
            name="math",
            instructions="Be right.",
            tools=[double],
            model=app.create_openai_compatible_model(),
        )
        answer = await agents.Runner.run(agent, payload["prompt"], hooks=collector)
        return {
            "rollout_data": collector.get_rollout_data(),
            "rewards": 1.0,
            "a": answer.final_output,
        }

    with scripted_model(policy) as model, served(rollout, app=app) as it:
        config = {**ROLLOUT, "base_url": model.base_url, "model_id": "m"}
        result = it.result({"prompt": "Twice 21?", "_rollout": config})
    assert result["status_code"] == 200, result
    assert result["a"] == "#### 42"
    first, second = (turn["formatted_request"] for turn in result["rollout_data"])
    assert [m["role"] for m in second["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert first["messages"] == second["messages"][:3]
    assert first["model"] == "m"
    assert first["tools"][0]["function"]["name"] == "double"
