"""`StrandsRolloutCollector`: a hook that keeps the conversation of each turn of a Strands agent.

One collector and one agent per request: a Strands agent refuses concurrent use, and its messages
go on from request to request. Needs the extra `strands`. Must not: change the agent.
"""

from __future__ import annotations

from typing import Any

from workers.agentcore.extras import optional
from workers.agentcore.turns import Turns

HookProvider: Any = optional("strands", "strands.hooks", "HookProvider")
MessageAddedEvent: Any = optional("strands", "strands.hooks", "MessageAddedEvent")
OpenAIModel: Any = optional("strands", "strands.models.openai", "OpenAIModel")


class StrandsRolloutCollector(HookProvider):
    """The turns of one request, each with all messages up to the assistant's."""

    def __init__(self) -> None:
        self._turns = Turns()

    def register_hooks(self, registry: Any, **_: Any) -> None:
        """Register with an agent."""
        registry.add_callback(MessageAddedEvent, self._note)

    def get_rollout_data(self) -> list[dict[str, Any]]:
        """Return one item per turn: `turn_id`, and `formatted_request` in the OpenAI format."""
        return self._turns.rollout_data()

    def _note(self, event: Any) -> None:
        if event.message["role"] != "assistant":
            return
        agent = event.agent
        self._turns.add(
            OpenAIModel.format_request_messages(agent.messages, agent.system_prompt),
            model=agent.model.get_config().get("model_id"),
            tools=[_tool(spec) for spec in agent.tool_registry.get_all_tool_specs()],
        )


def _tool(spec: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": spec["name"],
            "description": spec["description"],
            "parameters": spec["inputSchema"]["json"],
        },
    }
