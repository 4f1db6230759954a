"""`ClaudeAPIClient`: Anthropic's Messages API through the anthropic SDK, behind our interface.

Agents call `generate` with OpenAI messages and tools; `anthropic_format` translates both ways.
Importing this module loads anthropic (an optional extra), so `providers.py` imports it lazily.
Must not: read the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anthropic

from workers.core.model_response import ModelResponse
from workers.llm.anthropic_format import anthropic_request, response_of
from workers.llm.call_errors import HttpAnswer
from workers.llm.chat_answers import read_json_answer
from workers.llm.sdk_client import SdkClient

ANTHROPIC_BASE_URL = "https://api.anthropic.com"
DEFAULT_MODEL = "claude-sonnet-4-5"


class ClaudeAPIClient(SdkClient):
    """Claude behind the interface of `ChatClient`. The API returns no token ids or logprobs.

    Args:
        api_key: Anthropic API key.
        model: Model of calls that name none.
        base_url: With or without `/v1`.
        **options: As in `ChatClient`.
    """

    _path = "/v1/messages"
    _status_error = anthropic.APIStatusError
    _connection_error = anthropic.APIConnectionError

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
        return response_of(read_json_answer(answer, self._shown_url), self._shown_url)

    def _make_sdk(self, **options: Any) -> anthropic.AsyncAnthropic:
        http_client = anthropic.DefaultAioHttpClient(**self._http_options())
        return anthropic.AsyncAnthropic(http_client=http_client, **options)
