"""`OpenAIAgentsRLApp`: the app for agents of the OpenAI Agents SDK, and their policy's model.

Needs the extra `openai-agents`. Must not: collect turns, see `rollout_collector.py`.
"""

from __future__ import annotations

import os
from typing import Any

from workers.agentcore.app import AgentCoreRLApp
from workers.agentcore.extras import optional
from workers.agentcore.invocation import rollout_config

_MODULE = "agents.models.openai_chatcompletions"
ChatCompletionsModel: Any = optional("openai-agents", _MODULE, "OpenAIChatCompletionsModel")

#: For servers that want no key; the SDK refuses to work without one.
_NO_KEY = "none"


class OpenAIAgentsRLApp(AgentCoreRLApp):
    """An `AgentCoreRLApp` that makes models for agents of the OpenAI Agents SDK."""

    def create_openai_compatible_model(self) -> Any:
        """Return a model of the policy; call it inside the entrypoint.

        Endpoint and name are those of the invocation's `_rollout`, else `BASE_URL` and `MODEL_ID`.

        Raises:
            ValueError: Neither names an endpoint and a model.
        """
        from openai import AsyncOpenAI

        rollout = rollout_config()
        base_url = rollout.get("base_url") or os.environ.get("BASE_URL")
        name = rollout.get("model_id") or os.environ.get("MODEL_ID")
        if not base_url or not name:
            raise ValueError(
                "No policy is named: set BASE_URL and MODEL_ID, or let `_rollout` carry base_url "
                "and model_id."
            )
        key = rollout.get("api_key") or os.environ.get("OPENAI_API_KEY") or _NO_KEY
        # No code closes the client of an invocation, so each call closes its connection.
        headers = {"Connection": "close"}
        client = AsyncOpenAI(base_url=base_url, api_key=key, default_headers=headers)
        return ChatCompletionsModel(model=name, openai_client=client)
