"""The agent of `basic_app.py` as a rollout worker: what was added is marked with (RL)."""

from __future__ import annotations

from typing import Any

from reward import GSM8KReward
from strands import Agent
from strands_tools import calculator

from workers.agentcore import StrandsAgentCoreRLApp, StrandsRolloutCollector  # (RL)

app = StrandsAgentCoreRLApp()  # (RL)

model = app.create_openai_compatible_model()  # (RL) BASE_URL and MODEL_ID, or the payload's

reward_fn = GSM8KReward()  # (RL)


@app.rollout_entrypoint  # (RL)
async def invoke_agent(payload: dict[str, Any]) -> dict[str, Any]:
    """Solve one problem, and say what it was worth."""
    # One agent and one collector per request: an agent refuses concurrent use.
    rollout_collector = StrandsRolloutCollector()  # (RL)
    agent = Agent(
        model=model,
        tools=[calculator],
        system_prompt=(
            "Your task is to solve the math problem. Use calculator when applicable. "
            'Let\'s think step by step and output the final answer after "####".'
        ),
        hooks=[rollout_collector],  # (RL)
        callback_handler=None,
    )
    response = await agent.invoke_async(payload["prompt"])
    answer_text = "".join(part.get("text", "") for part in response.message["content"])
    return {  # (RL)
        "rollout_data": rollout_collector.get_rollout_data(),
        "rewards": reward_fn(response_text=answer_text, ground_truth=payload["answer"]),
    }


if __name__ == "__main__":
    app.run()
