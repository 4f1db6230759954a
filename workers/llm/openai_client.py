"""`OpenAIClient`: any OpenAI-compatible endpoint through the openai SDK on its aiohttp transport.

Agents call `generate`. Importing this module loads openai, so `providers.py` imports it lazily.
Must not: read the environment.
"""

from __future__ import annotations

from typing import Any

import openai

from workers.llm.sdk_client import SdkClient


class OpenAIClient(SdkClient):
    """Chat completions through the openai SDK; arguments as in `ChatClient`."""

    _status_error = openai.APIStatusError
    _connection_error = openai.APIConnectionError

    def _make_sdk(self, **options: Any) -> openai.AsyncOpenAI:
        http_client = openai.DefaultAioHttpClient(**self._http_options())
        return openai.AsyncOpenAI(http_client=http_client, **options)

    def _sdk_headers(self) -> dict[str, Any]:
        without_key = {} if self.api_key else {"Authorization": openai.Omit()}
        return {**super()._sdk_headers(), **without_key}
