"""`StrandsAgentCoreRLApp`: the app for Strands agents, and the model that calls their policy.

Needs the extra `strands`. The model looks its endpoint up for each call, so one that a module made
at import serves every invocation. Must not: collect turns, see `rollout_collector.py`.
"""

from __future__ import annotations

import os
from typing import Any

from workers.agentcore.app import AgentCoreRLApp
from workers.agentcore.extras import optional
from workers.agentcore.invocation import rollout_config

OpenAIModel: Any = optional("strands", "strands.models.openai", "OpenAIModel")

#: For servers that want no key; the SDK refuses to work without one.
_NO_KEY = "none"


class StrandsAgentCoreRLApp(AgentCoreRLApp):
    """An `AgentCoreRLApp` that makes models for Strands agents."""

    def create_openai_compatible_model(
        self, provider_model_id: str | None = None, **options: Any
    ) -> Any:
        """Return a Strands model: the policy that is trained, or a hosted one to compare with.

        The policy's endpoint and name are those of the invocation's `_rollout` (`base_url`,
        `model_id`, `sampling_params`, `api_key`), else `BASE_URL` and `MODEL_ID` of the process.
        Calls are not streamed unless `stream=True` is given.

        Args:
            provider_model_id: A model hosted by Amazon Bedrock; None: the policy.
            **options: As for the Strands model, such as `params={"temperature": 1.0}`.
        """
        if provider_model_id is None:
            return PolicyModel(**options)
        hosted = optional("strands", "strands.models", "BedrockModel")
        region = os.environ.get("AWS_REGION") or None
        return hosted(model_id=provider_model_id, **({"region_name": region} | options))


class PolicyModel(OpenAIModel):
    """A Strands model whose endpoint, name and sampling follow the current invocation.

    Args:
        client_args: For the OpenAI client; the invocation's endpoint and key take precedence.
        **config: As for Strands' `OpenAIModel`.
    """

    def __init__(self, client_args: dict[str, Any] | None = None, **config: Any) -> None:
        super().__init__(client_args=client_args, **config)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration for the current invocation; Strands reads it in each call."""
        rollout = rollout_config()
        name = rollout.get("model_id") or self._given.get("model_id") or os.environ.get("MODEL_ID")
        params = {**(self._given.get("params") or {}), **(rollout.get("sampling_params") or {})}
        return {"stream": False, **self._given, "model_id": name or "", "params": params}

    @config.setter
    def config(self, config: dict[str, Any]) -> None:
        self._given = dict(config)

    def update_config(self, **config: Any) -> None:
        """Change the configuration; an invocation's `_rollout` takes precedence."""
        self._given |= config

    def format_request(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the request of one call.

        Raises:
            ValueError: Neither the invocation nor the environment names a model.
        """
        if not self.config["model_id"]:
            raise ValueError("No model is named: set MODEL_ID, or let `_rollout` carry model_id.")
        return super().format_request(*args, **options)

    def _resolve_client_args(self) -> dict[str, Any]:
        given, rollout = self.client_args, rollout_config()
        base_url = rollout.get("base_url") or given.get("base_url") or os.environ.get("BASE_URL")
        if not base_url:
            raise ValueError("No endpoint is named: set BASE_URL, or let `_rollout` name base_url.")
        key = rollout.get("api_key") or given.get("api_key") or os.environ.get("OPENAI_API_KEY")
        return {**given, "base_url": base_url, "api_key": key or _NO_KEY}
