"""`ClaudeAPIClient`: Anthropic's Messages API through the anthropic SDK, behind our interface.

Agents call `generate` with OpenAI messages and tools; `anthropic_format` translates both ways.
Importing this module loads anthropic (an optional extra), so nothing imports it at package level.
Must not: read the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import anthropic
import httpx2

from workers.core.model_response import ModelResponse
from workers.llm.anthropic_format import anthropic_request, response_of
from workers.llm.call_errors import HttpAnswer
from workers.llm.chat_answers import read_json_answer
from workers.llm.chat_client import ChatClient
from workers.llm.connections import shared_connection
from workers.llm.sdk_answers import SDK_TIMEOUT, http_options, transport_error

ANTHROPIC_BASE_URL = "https://api.anthropic.com"
DEFAULT_MODEL = "claude-sonnet-4-5"


class ClaudeAPIClient(ChatClient):
    """Claude behind the interface of `ChatClient`; token ids and logprobs are not to be had here.

    Args:
        api_key: Anthropic API key.
        model: Model of calls that name none.
        base_url: With or without `/v1`.
        **options: As in `ChatClient`.
    """

    _path = "/v1/messages"

    def __init__(
        self,
        api_key: str | None = None,
        *,
        model: str | None = DEFAULT_MODEL,
        base_url: str = ANTHROPIC_BASE_URL,
        **options: Any,
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        super().__init__(root, api_key, model=model, **{**options, "capture_tokens": False})

    def _request(
        self,
        messages: Sequence[Mapping[str, Any]],
        model: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        request = anthropic_request(self._named(model), messages, tools, sampling)
        return {**request, **self._extra_body}

    def _read(self, answer: HttpAnswer) -> ModelResponse:
        return response_of(read_json_answer(answer, self._url), self._url)

    async def _post(self, body: bytes) -> HttpAnswer:
        sdk = shared_connection(
            self, ("anthropic", self.base_url, self.api_key, self.max_answer_bytes), self._connect
        )
        try:
            answer = await sdk.client.post(
                self._path,
                cast_to=httpx2.Response,
                content=body,
                options={"headers": {**sdk.headers, **self._headers}},
            )
        except anthropic.APIStatusError as error:
            answer = error.response
        except (anthropic.APIConnectionError, aiohttp.ClientError, OSError) as error:
            raise transport_error(self._url, error) from error
        return HttpAnswer(answer.status_code, answer.headers, answer.content)

    def _connect(self) -> _SharedSdk:
        return _SharedSdk(self)


class _SharedSdk:
    def __init__(self, owner: ClaudeAPIClient) -> None:
        self.client = anthropic.AsyncAnthropic(
            base_url=owner.base_url,
            # An empty key would send the SDK looking for credentials in the environment.
            api_key=owner.api_key or "none",
            max_retries=0,
            timeout=SDK_TIMEOUT,
            http_client=anthropic.DefaultAioHttpClient(
                **http_options(owner.base_url, owner.max_answer_bytes)
            ),
        )
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

    async def aclose(self) -> None:
        await self.client.close()
