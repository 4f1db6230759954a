"""`OpenAIClient`: any OpenAI-compatible endpoint through the openai SDK on its aiohttp transport.

Agents call `generate`. One `AsyncOpenAI` per base URL, key and event loop is shared by all
clients; the SDK's own retries are off, ours are in `call_retries`. Importing this module loads
openai, so nothing imports it at package level. Must not: read the environment.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import httpx2
import openai

from workers.llm.call_errors import HttpAnswer
from workers.llm.chat_client import ChatClient
from workers.llm.connections import shared_connection
from workers.llm.sdk_answers import SDK_TIMEOUT, http_options, transport_error

# The key of an endpoint that wants none: the SDK refuses to start without.
_NO_KEY = "none"


class OpenAIClient(ChatClient):
    """Chat completions through the openai SDK; arguments as in `ChatClient`."""

    async def _post(self, body: bytes) -> HttpAnswer:
        sdk = shared_connection(
            self, ("openai", self.base_url, self.api_key, self.max_answer_bytes), self._connect
        )
        try:
            answer = await sdk.client.post(
                self._path,
                cast_to=httpx2.Response,
                content=body,
                options={"headers": {**sdk.headers, **self._headers}},
            )
        except openai.APIStatusError as error:
            answer = error.response
        # aiohttp's protocol errors are not all mapped by the SDK's transport.
        except (openai.APIConnectionError, aiohttp.ClientError, OSError) as error:
            raise transport_error(self._url, error) from error
        return HttpAnswer(answer.status_code, answer.headers, answer.content)

    def _connect(self) -> _SharedSdk:
        return _SharedSdk(self)


class _SharedSdk:
    def __init__(self, owner: OpenAIClient) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=owner.base_url,
            api_key=owner.api_key or _NO_KEY,
            max_retries=0,
            timeout=SDK_TIMEOUT,
            http_client=openai.DefaultAioHttpClient(
                **http_options(owner.base_url, owner.max_answer_bytes)
            ),
        )
        self.headers: dict[str, Any] = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        if not owner.api_key:
            self.headers["Authorization"] = openai.Omit()

    async def aclose(self) -> None:
        await self.client.close()
