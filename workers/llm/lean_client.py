"""`LeanClient`: any OpenAI-compatible endpoint through aiohttp and orjson alone.

The types, errors, retries and token capture are those of `OpenAIClient`, for a fraction of the CPU
time; the setting `llm.client` selects it. All clients of a base URL and event loop share a session.
Must not: import an SDK, or read the environment at import.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict

from pipeline.contract.errors import ModelTransportError
from workers.llm.call_errors import HttpAnswer, answer_too_long, check_answer_head
from workers.llm.chat_client import CONNECT_TIMEOUT_S, KEEPALIVE_S, MAX_CONNECTIONS, ChatClient
from workers.llm.chat_stream import EVENT_STREAM, ChatStreamReader
from workers.llm.connections import shared_connection


class LeanClient(ChatClient):
    """Chat completions without an SDK; arguments as in `ChatClient`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent_headers = CIMultiDict(
            {
                "Content-Type": "application/json",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "User-Agent": "rollout-pipeline",
                **({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}),
                **self._headers,
            }
        )

    _streams = True

    async def _post(self, path: str, body: bytes, stream: ChatStreamReader | None) -> HttpAnswer:
        shared = shared_connection(self, ("lean", self.base_url), self._connect)
        try:
            async with shared.session.post(
                f"{self.base_url}{path}",
                data=body,
                headers=self._sent_headers,
                # A redirect would send the prompt and the key to an unconfigured address.
                allow_redirects=False,
                proxy=shared.proxy,
            ) as answer:
                check_answer_head(
                    answer.headers, url=self._shown_url, limit_bytes=self.max_answer_bytes
                )
                if stream is not None and answer.content_type == EVENT_STREAM:
                    return await self._streamed(answer, stream)
                return HttpAnswer(answer.status, answer.headers, await self._body(answer))
        except aiohttp.ServerTimeoutError as error:
            raise _transport(self._shown_url, error, "connect_timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _transport(self._shown_url, error, "connection") from error

    async def _streamed(
        self, answer: aiohttp.ClientResponse, stream: ChatStreamReader
    ) -> HttpAnswer:
        await self._read_body(answer, stream.feed)
        if not stream.is_complete:
            raise ModelTransportError(
                f"{self._shown_url} ended its stream before the end of the answer.",
                code="connection",
            )
        return HttpAnswer(answer.status, answer.headers, b"", stream.completion())

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        chunks: list[bytes] = []
        await self._read_body(answer, chunks.append)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _read_body(
        self, answer: aiohttp.ClientResponse, take: Callable[[bytes], None]
    ) -> None:
        read_bytes = 0
        async for chunk in answer.content.iter_any():
            read_bytes += len(chunk)
            if read_bytes > self.max_answer_bytes:
                raise answer_too_long(self._shown_url, self.max_answer_bytes)
            take(chunk)

    def _connect(self) -> _SharedSession:
        return _SharedSession(self.base_url)


class _SharedSession:
    def __init__(self, base_url: str) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        self.proxy = _proxy_for(base_url)

    async def aclose(self) -> None:
        await self.session.close()


# Looked up once per session, because aiohttp's `trust_env` does so for every request.
def _proxy_for(base_url: str) -> str | None:
    parts = urlsplit(base_url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _transport(url: str, error: Exception, code: str) -> ModelTransportError:
    return ModelTransportError(f"{url}: {type(error).__name__}: {error}", code=code)
