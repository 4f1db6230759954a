"""`OpenAIAgentsRolloutCollector`: run hooks that keep the conversation of each turn.

One collector per request: `Runner.run(agent, prompt, hooks=collector)`. Needs the extra
`openai-agents`. Must not: change the run.
"""

from __future__ import annotations

from typing import Any

from workers.agentcore.extras import optional
from workers.agentcore.turns import Turns

RunHooks: Any = optional("openai-agents", "agents", "RunHooks")
Converter: Any = optional("openai-agents", "agents.models.chatcmpl_converter", "Converter")


class OpenAIAgentsRolloutCollector(RunHooks):
    """The turns of one request, each with all messages up to the assistant's."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._asked: list[dict[str, Any]] = []

    def get_rollout_data(self) -> list[dict[str, Any]]:
        """Return one item per turn: `turn_id`, and `formatted_request` in the OpenAI format."""
        return self._turns.rollout_data()

    async def on_llm_start(
        self, context: Any, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        """Keep the messages of the request."""
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._asked = [*system, *Converter.items_to_messages(input_items)]

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
        """Add the turn."""
        answer = Converter.items_to_messages(response.to_input_items())
        model = getattr(agent.model, "model", agent.model)
        tools = [_tool(tool) for tool in agent.tools if hasattr(tool, "params_json_schema")]
        self._turns.add([*self._asked, *answer], model=model, tools=tools)


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.params_json_schema,
        },
    }
