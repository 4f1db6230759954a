"""The model calls of one attempt: made through the shared client, and recorded.

An agent gets a `ModelCalls` as its `llm_generate_func`. A call is recorded before the agent sees
its answer, and is kept when the agent fails. Must not: retry; the client does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

from pipeline.contract.errors import AgentError, ContractError, ModelError
from pipeline.contract.model_call import ABORTED, CallTokens, ModelCall
from pipeline.contract.run import TokenWish
from pipeline.tokens.prompt_prefixes import PromptPrefixes
from workers.core.endpoint import MAIN_AGENT, Endpoint, NoEndpoint
from workers.core.model_response import ModelResponse
from workers.core.response_delta import OnDelta, delta_of
from workers.llm.known_prompts import KnownPrompts
from workers.process.journal import Journal
from workers.process.recorded_answers import response_of

#: Serves an attempt's calls over HTTP: `(generate, with_socket=)`.
Serve = Callable[..., AbstractAsyncContextManager[Endpoint]]


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
        tokens: Whether token ids are recorded, and whether a call without them is an error.
        journal: Answers calls that an earlier attempt made, and records the others; None: no call
            is replayed or recorded for later attempts.
        serve: Serves the calls of agents with a client of their own; None: there is no gateway.
    """

    def __init__(
        self,
        client: ModelClient,
        *,
        model: str | None,
        defaults: Mapping[str, Any],
        overrides: Mapping[str, Any],
        tokens: TokenWish = "wanted",
        journal: Journal | None = None,
        serve: Serve | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._defaults = dict(defaults)
        self._overrides = dict(overrides)
        self._token_wish: TokenWish = tokens
        self._serve = serve
        self._closed = False
        self._journal = journal
        self._prefixes = PromptPrefixes()
        self._known = KnownPrompts()
        self.calls: list[ModelCall] = []
        #: Number of the call under way, or of the last one; the first is 1.
        self.current_call = 0
        #: The error of the last call; None after one that was answered.
        self.failure: ModelError | None = None
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
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        agent: str = MAIN_AGENT,
        trainable: bool = True,
        on_delta: OnDelta | None = None,
        **options: Any,
    ) -> ModelResponse:
        """Request one response and record the call.

        The response has no prompt ids: they are in the record, and an agent that keeps its
        responses would keep the prompt of each call.

        Args:
            messages: The conversation in the OpenAI format.
            agent: Label of a sub-agent, whose calls form a conversation of their own.
            trainable: False for calls that are no samples to train on, such as a judge's.
            on_delta: Called with each piece of the response that the model's server streams.
            **options: Sampling parameters and other fields of the request.

        Raises:
            ModelError: The client's error.
            AgentError: The attempt has ended.
            ContractError: The run requires token ids, and the server returned none.
        """
        if self._closed:
            raise AgentError(
                "The attempt has ended: no further model call is made. A task of the agent still "
                "runs; the agent must await all its tasks before it returns.",
                code="late_call",
            )
        self.current_call = len(self.calls) + 1
        self.last_messages = sent = list(map(dict, messages))
        parameters = {"model": self._model, **self._defaults, **options, **self._overrides}
        self.failure = None
        journal = self._journal
        recorded = journal.find(sent, parameters) if journal is not None else None
        if recorded is None:
            response = await self._request(sent, parameters, on_delta)
        else:
            # Give other attempts a turn: an agent without tools would replay its calls at once.
            await asyncio.sleep(0)
            response = response_of(recorded)
            if on_delta is not None:
                on_delta(delta_of(response))
        message = response.to_message()
        self.last_messages = [*sent, message]
        call = self._record(response, message, agent=agent, trainable=trainable)
        call.replayed = recorded is not None
        if journal is not None:
            journal.note(sent, parameters, response, call, recorded)
        if self._token_wish == "required" and trainable and call.tokens is None:
            raise _no_ids(response)
        if response.prompt_token_ids is None:
            return response
        return replace(response, prompt_token_ids=None)

    def serve(
        self, generate: Callable[..., Any], *, with_socket: bool
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Answer HTTP calls with `generate` inside the block, see `open_endpoint`.

        Raises:
            NoEndpoint: There is no gateway.
        """
        if self._serve is None:
            raise NoEndpoint("These model calls have no gateway.")
        return self._serve(generate, with_socket=with_socket)

    async def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, Any],
        on_delta: OnDelta | None,
    ) -> ModelResponse:
        streamed = {} if on_delta is None else {"on_delta": on_delta}
        try:
            with self._known.in_use():
                return await self._client.generate(messages, **parameters, **streamed)
        except ModelError as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Reject further calls: the attempt has ended, even if its agent has not."""
        self._closed = True

    def _record(
        self,
        response: ModelResponse,
        message: dict[str, Any],
        *,
        agent: str,
        trainable: bool,
    ) -> ModelCall:
        # Batches by tokens need a count, also where the server reports no usage.
        prompt_tokens = _count(response.prompt_tokens, response.prompt_token_ids)
        completion_tokens = _count(response.completion_tokens, response.completion_token_ids)
        self.prompt_tokens += prompt_tokens or 0
        self.completion_tokens += completion_tokens or 0
        sequence = len(self.calls)
        tokens = self._tokens_of(response, sequence)
        is_sample = tokens is not None and response.finish_reason not in ABORTED
        call = ModelCall(
            sequence=sequence,
            agent=agent,
            response=message,
            model=response.model,
            endpoint=response.metadata.get("endpoint"),
            finish_reason=response.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            latency_ms=response.latency_ms,
            policy_version_before=response.metadata.get("policy_version_before"),
            policy_version=response.policy_version,
            sampling=response.metadata.get("sampling", {}),
            token_source=response.metadata.get("token_source"),
            trainable=trainable and is_sample,
            tokens=tokens,
        )
        self.calls.append(call)
        return call

    def _tokens_of(self, response: ModelResponse, sequence: int) -> CallTokens | None:
        prompt, completion = response.prompt_token_ids, response.completion_token_ids
        if prompt is None or completion is None or self._token_wish == "off":
            return None
        return self._prefixes.add(sequence, prompt, completion, response.logprobs)


def _no_ids(response: ModelResponse) -> ContractError:
    found = response.metadata
    why = found.get("token_refusal") or (
        "only those of the completion" if response.completion_token_ids is not None else "none"
    )
    return ContractError(
        f"The run requires token ids, and {found.get('endpoint') or 'the server'} returned {why}. "
        "Serve the model with vLLM 0.10.2 or SGLang; if it is behind a proxy, set llm.server for "
        "the workers. Or start the run with tokens=wanted, which records text alone.",
        code="no_token_ids",
    )


def _count(usage: int | None, ids: Sequence[int] | None) -> int | None:
    return len(ids) if usage is None and ids is not None else usage
