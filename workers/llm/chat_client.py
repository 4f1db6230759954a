"""The base of all model clients: request body, retries, limits, and reading of the answer.

`OpenAIClient`, `LeanClient` and `ClaudeAPIClient` derive from it and add only how bytes are sent
(and, for Claude, the message format). Must not: import an SDK, or read the environment.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from pipeline.contract.base_urls import without_credentials
from pipeline.contract.errors import (
    ConfigError,
    ModelBadRequest,
    ModelError,
    ModelRateLimit,
    ModelTransportError,
)
from pipeline.contract.url_secrets import hide_passwords
from workers.core.model_response import ModelResponse
from workers.core.response_delta import OnDelta
from workers.llm.call_errors import HttpAnswer
from workers.llm.call_limits import CallLimiter
from workers.llm.call_retries import CallResult, CallRetries, CallRetryPolicy, broken_stream
from workers.llm.chat_answers import read_completion
from workers.llm.chat_stream import STREAM_FIELDS, ChatStreamReader
from workers.llm.connections import release_connections
from workers.llm.json_text import dump_json
from workers.llm.model_list import list_models
from workers.llm.token_capture import CAPTURE_FIELDS

MAX_ANSWER_BYTES = 32 * 2**20
MAX_CONNECTIONS = 2000
CONNECT_TIMEOUT_S = 10.0
#: uvicorn, and so vLLM and SGLang, close a connection after 5 s without a request. A request sent
#: while the server closes the connection is lost, so the client closes it earlier.
KEEPALIVE_S = 4.5
COMPLETIONS_PATH = "/completions"
#: The limiter's estimate for a call without `max_tokens`.
DEFAULT_COMPLETION_TOKENS = 512
_MOST_NAMED = 10
_NAME_A_MODEL = "Set OPENAI_MODEL or give model= to the client; in a run give --model."


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One call, ready to be sent any number of times."""

    client: ChatClient
    body: bytes
    sampling: Mapping[str, Any]
    estimated_tokens: int
    on_delta: OnDelta | None = None
    path: str | None = None

    async def send(self) -> ModelResponse:
        """Send the request once.

        Raises:
            ModelError: As in `ChatClient.generate`, without a retry.
        """
        return await self.client.try_once(self.body, self.on_delta, path=self.path)

    def response_of(self, outcome: CallResult) -> ModelResponse:
        """Return the answer, with retries and waits in its metadata."""
        metadata: dict[str, Any] = {
            **outcome.response.metadata,
            "sampling": dict(self.sampling),
            "endpoint": self.client.endpoint,
        }
        if outcome.retries:
            metadata["retries"] = outcome.retries
            metadata["waited_s"] = round(outcome.waited_s, 3)
        if outcome.rate_limit_wait_s > 0.001:
            metadata["rate_limit_wait_s"] = round(outcome.rate_limit_wait_s, 3)
        latency_ms = round(outcome.latency_ms, 3)
        return replace(outcome.response, latency_ms=latency_ms, metadata=metadata)


class ChatClient(ABC):
    """A model behind one base URL. Clients are cheap, because they share one connection pool.

    Args:
        base_url: Up to and without the path of the call, such as `http://127.0.0.1:8000/v1`.
        api_key: The endpoint's key; None or "" sends none.
        model: Model of calls that name none.
        timeout_s: Seconds for one try, from connecting to the last byte.
        retries: Bounds of the retries of one call.
        limiter: Gives permission for each try; None: calls are unlimited.
        capture_tokens: Request token ids and logprobs, which a trainer needs.
        capture_fields: Request fields that are added for `capture_tokens`.
        max_tokens_field: The endpoint's name for `max_tokens`.
        max_answer_bytes: Longest answer that is read.
        sampling: Default sampling parameters; parameters of a call override them.
        extra_body: Fields put into every request as they are.
        headers: Headers sent with every request.
        call_retries: The runner of `retries`; tests pass one with its own clock.
        watch: Called after each try, with the error if a retry can help, with None for any answer.
        finds_model: Without a model, ask the endpoint for its models, and take the only one.
        find_capture: Returns the request fields for token capture, or None while they cannot be
            known; called before each call until it returns some.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        retries: CallRetryPolicy | None = None,
        limiter: CallLimiter | None = None,
        capture_tokens: bool = False,
        capture_fields: Mapping[str, Any] = CAPTURE_FIELDS,
        max_tokens_field: str = "max_tokens",
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        sampling: Mapping[str, Any] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        call_retries: CallRetries | None = None,
        watch: Callable[[ModelError | None], None] = lambda _: None,
        finds_model: bool = False,
        find_capture: Callable[[], Awaitable[Mapping[str, Any] | None]] | None = None,
    ) -> None:
        self.base_url = _checked_base_url(base_url)
        self.api_key = api_key or ""
        self.model = model
        self.timeout_s = timeout_s
        self.limiter = limiter
        self.max_answer_bytes = max_answer_bytes
        self.retries = call_retries or CallRetries(retries or CallRetryPolicy())
        self.endpoint = without_credentials(self.base_url)
        self._capture = dict(capture_fields) if capture_tokens else {}
        self._max_tokens_field = max_tokens_field
        self._sampling = dict(sampling or {})
        self._extra_body = dict(extra_body or {})
        self._headers = dict(headers or {})
        self._watch = watch
        self._finds_model = finds_model
        self._find_capture = find_capture
        self._shown_url = f"{self.endpoint}{self._path}"

    #: Whether the client can pass on the pieces of an answer.
    _streams = False
    #: Path of the call below the base URL.
    _path = "/chat/completions"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint!r}, model={self.model!r})"

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        on_delta: OnDelta | None = None,
        **sampling: Any,
    ) -> ModelResponse:
        """Request one answer; usable directly as an agent's `llm_generate_func`.

        With `on_delta` the answer is streamed if the client supports streams: the function gets
        each piece, and the whole answer is returned too. After the first piece a call is not tried
        again.

        With `prompt`, a text or token ids, the call is a text completion and the messages are not
        sent. `sampling` goes into the request under its own names (`top_p`, `stop`, `seed`,
        `tool_choice`, …); None values are not sent. The answer's metadata holds `sampling` as sent,
        `endpoint`, `retries`, `waited_s` and `rate_limit_wait_s`.

        Raises:
            ModelRateLimit: The last retry got a 429.
            ModelTransportError: The last retry got a 5xx, a timeout or a lost connection.
            ContextOverflow: The prompt exceeds the model's context.
            ModelBadRequest: The server rejected the request, or the answer is not a completion.
            ConfigError: No model is named, and the endpoint does not have exactly one.
        """
        if self._finds_model and not (model or self.model):
            self.model = await self._only_model()
        await self.learn_capture()
        call = self.prepare(
            messages,
            max_tokens,
            temperature,
            tools=tools,
            model=model,
            on_delta=on_delta,
            **sampling,
        )
        outcome = await self.retries.run(
            call.send, limiter=self.limiter, estimated_tokens=call.estimated_tokens
        )
        return call.response_of(outcome)

    async def learn_capture(self) -> None:
        """Look up the request fields for token ids, unless they are known."""
        if self._find_capture is not None and (found := await self._find_capture()) is not None:
            self._capture, self._find_capture = dict(found), None

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        on_delta: OnDelta | None = None,
        **sampling: Any,
    ) -> PreparedCall:
        """Return the request that `generate` sends, for a caller that sends it itself."""
        if sampling.get("stream") or (sampling.get("n") or 1) != 1:
            raise ValueError("generate asks for one whole answer: stream and n > 1 cannot be set")
        sent = {**self._sampling, **sampling}
        if max_tokens is not None:
            sent["max_tokens"] = max_tokens
        if temperature is not None:
            sent["temperature"] = temperature
        sent = {name: value for name, value in sent.items() if value is not None}
        prompt = sent.pop("prompt", None)
        request = self._request(messages, model or self.model, tools, sent)
        if prompt is not None:
            self._require_completions()
            del request["messages"]
            request["prompt"] = prompt
        if on_delta is not None and self._streams:
            request |= STREAM_FIELDS
        else:
            on_delta = None
        body = dump_json(request)
        answer_tokens = sent.get("max_tokens") or DEFAULT_COMPLETION_TOKENS
        # Four bytes per token is a sufficient estimate: the limiter settles the difference.
        estimated_tokens = len(body) // 4 + int(answer_tokens)
        path = None if prompt is None else COMPLETIONS_PATH
        return PreparedCall(self, body, sent, estimated_tokens, on_delta, path)

    async def __call__(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Call `generate`, so that the client itself is an `llm_generate_func`."""
        return await self.generate(messages, **options)

    async def aclose(self) -> None:
        """Release the shared connections; those without another user are closed."""
        await release_connections(self)

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    @abstractmethod
    async def _post(self, path: str, body: bytes, stream: ChatStreamReader | None) -> HttpAnswer:
        """Send one request and return the complete answer, with any status.

        A client that streams feeds an answer of events to the reader, and returns the completion.

        Raises:
            ModelTransportError: No answer came.
            ModelBadRequest: The answer is longer than `max_answer_bytes`.
        """

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        model: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self._named(model), "messages": messages}
        if tools:
            request["tools"] = tools
        request.update(sampling)
        if "max_tokens" in request and self._max_tokens_field != "max_tokens":
            request[self._max_tokens_field] = request.pop("max_tokens")
        request.update(self._capture)
        request.update(self._extra_body)
        return request

    def _require_completions(self) -> None:
        if self._path != ChatClient._path:
            raise ModelBadRequest(f"{self.endpoint} has no text completions.", code="http_404")

    def _named(self, model: str | None) -> str:
        if not model:
            raise ConfigError(f"No model is named for {self.endpoint}.", remedy=_NAME_A_MODEL)
        return model

    async def _only_model(self) -> str:
        authorization = f"Bearer {self.api_key}" if self.api_key else None
        found = await asyncio.to_thread(
            list_models, self.endpoint, authorization, timeout_s=CONNECT_TIMEOUT_S
        )
        if len(found.models) == 1:
            return found.models[0]
        some = ", ".join(found.models[:_MOST_NAMED]) + (
            ", ..." if len(found.models) > _MOST_NAMED else ""
        )
        raise ConfigError(
            f"No model is named for {self.endpoint}.",
            why=f"It lists {len(found.models)} models: {some}." if some else found.error or "",
            remedy=_NAME_A_MODEL,
        )

    def _read(self, answer: HttpAnswer) -> ModelResponse:
        return read_completion(answer, self._shown_url)

    async def try_once(
        self, body: bytes, on_delta: OnDelta | None = None, *, path: str | None = None
    ) -> ModelResponse:
        """Send a prepared body and read the answer, without the limiter and without retries.

        Raises:
            ModelError: As in `generate`.
        """
        try:
            response = await self._exchange(body, on_delta, path or self._path)
        except ModelError as error:
            is_passing = isinstance(error, ModelRateLimit | ModelTransportError)
            self._watch(error if is_passing else None)
            raise
        self._watch(None)
        return response

    async def _exchange(self, body: bytes, on_delta: OnDelta | None, path: str) -> ModelResponse:
        stream = None if on_delta is None else ChatStreamReader(on_delta, self._shown_url)
        try:
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await self._post(path, body, stream)
            except TimeoutError:
                raise ModelTransportError(
                    f"{self._shown_url} gave no whole answer within {self.timeout_s:g} s.",
                    code="timeout",
                ) from None
            return self._read(answer)
        except ModelError as error:
            if stream is not None and stream.has_begun:
                raise broken_stream(self._redacted(error)) from None
            raise self._redacted(error) from error.__cause__

    def _redacted(self, error: ModelError) -> ModelError:
        # Some servers quote the rejected key, and errors are stored and shown.
        if not self.api_key or self.api_key not in str(error):
            return error
        return type(error)(
            str(error).replace(self.api_key, "***"),
            code=error.code,
            retry_after_s=error.retry_after_s,
        )


def _checked_base_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{hide_passwords(base_url)!r} is not the base URL of a model endpoint.",
            remedy="Give one such as http://127.0.0.1:8000/v1.",
        )
    return base_url.rstrip("/")
