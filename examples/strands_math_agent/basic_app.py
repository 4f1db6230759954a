"""A Strands agent that solves math problems, as it runs in production on AgentCore."""

from __future__ import annotations

from typing import Any

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from strands import Agent
from strands.models import BedrockModel
from strands_tools import calculator

app = BedrockAgentCoreApp()

model = BedrockModel(model_id="us.anthropic.claude-sonnet-4-20250514-v1:0")

agent = Agent(
    model=model,
    tools=[calculator],
    system_prompt=(
        "Your task is to solve the math problem. Use calculator when applicable. "
        'Let\'s think step by step and output the final answer after "####".'
    ),
    callback_handler=None,
)


@app.entrypoint
async def invoke_agent(payload: dict[str, Any]) -> str:
    """Answer one problem."""
    response = await agent.invoke_async(payload["prompt"])
    return response.message["content"][0]["text"]


if __name__ == "__main__":
    app.run()
