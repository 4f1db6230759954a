"""The model calls of one attempt: made through the shared client, recorded as they happen.

An agent gets a `ModelCalls` as its `llm_generate_func`. The recorded calls are kept when the agent
fails, for every kind of agent. Must not: retry; the client does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pipeline.contract.errors import AgentError
from pipeline.contract.trajectory import ModelCall
from workers.core.model_response import ModelResponse


class ModelClient(Protocol):
    """A client of one model endpoint, or of several replicas."""

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Request one response."""
        ...


class ModelCalls:
    """Calls the model for one attempt.

    Args:
        client: The shared client of the endpoint.
        model: Model of calls that name none.
        defaults: Sampling parameters that the agent may override.
        overrides: Sampling parameters of the run, which override those of the agent.
        on_call: Called with the number of each call as it begins.
    """

    def __init__(
        self,
        client: ModelClient,
        *,
        model: str | None,
        defaults: Mapping[str, Any],
        overrides: Mapping[str, Any],
        on_call: Callable[[int], None],
    ) -> None:
        self._client = client
        self._model = model
        self._defaults = dict(defaults)
        self._overrides = dict(overrides)
        self._on_call = on_call
        self._closed = False
        self.calls: list[ModelCall] = []
        self.prompt_tokens = 0
        self.completion_tokens = 0
        #: The messages of the last call and its response: the only conversation of an agent that
        #: keeps no trajectory.
        self.last_messages: list[dict[str, Any]] = []

    async def __call__(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Request one response; an `llm_generate_func`."""
        return await self.generate(messages, **options)

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Request one response and record the call.

        Raises:
            ModelError: The client's error.
            AgentError: The attempt has ended, but its agent goes on.
        """
        if self._closed:
            raise AgentError("The attempt has ended: no further model call is made.")
        self._on_call(len(self.calls) + 1)
        self.last_messages = list(map(dict, messages))
        response = await self._client.generate(
            messages,
            **{"model": self._model, **self._defaults, **options, **self._overrides},
        )
        self.last_messages.append(response.to_message())
        self._record(response)
        return response

    def close(self) -> None:
        """Reject further calls: the attempt has ended, even if its agent has not."""
        self._closed = True

    @property
    def versions(self) -> list[int]:
        """The policy versions of the responses."""
        return [call.policy_version for call in self.calls if call.policy_version is not None]

    def _record(self, response: ModelResponse) -> None:
        self.prompt_tokens += response.prompt_tokens or 0
        self.completion_tokens += response.completion_tokens or 0
        self.calls.append(
            ModelCall(
                sequence=len(self.calls),
                model=response.model,
                endpoint=response.metadata.get("endpoint"),
                finish_reason=response.finish_reason,
                prompt_tokens=response.prompt_tokens,
                completion_tokens=response.completion_tokens,
                latency_ms=response.latency_ms,
                policy_version=response.policy_version,
                prompt_token_ids=response.prompt_token_ids,
                completion_token_ids=response.completion_token_ids,
                logprobs=response.logprobs,
            )
        )
