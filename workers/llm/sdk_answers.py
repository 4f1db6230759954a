"""Bounds what an SDK reads, and names what went wrong below it.

`OpenAIClient` and `ClaudeAPIClient` hang it into their SDKs, which share one HTTP library.
Must not: know either SDK.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import httpx2

from pipeline.contract.errors import ModelError, ModelTransportError
from workers.llm.chat_client import (
    CONNECT_TIMEOUT_S,
    KEEPALIVE_S,
    MAX_CONNECTIONS,
    answer_too_long,
    check_answer_head,
)

#: The whole of a try is bounded by the client; here only reaching the server.
SDK_TIMEOUT = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)


def http_options(url: str, limit_bytes: int) -> dict[str, Any]:
    """Return the arguments for an SDK's aiohttp client: pool, no redirects, bounded answers."""
    return {
        "limits": httpx2.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S),
        # A redirect would carry prompt and key to an address nobody allowed.
        "follow_redirects": False,
        "event_hooks": {"response": [_bound_answers(url, limit_bytes)]},
    }


def transport_error(url: str, error: BaseException) -> ModelError:
    """Name an error by what lies below it: the SDKs call any lost connection a timeout.

    Our own refusal of an answer comes back as it is; some SDK versions wrap it.
    """
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, aiohttp.ClientError):
        cause = cause.__cause__
        if isinstance(cause, ModelError):
            return cause
    return ModelTransportError(
        f"{url}: {type(cause).__name__}: {cause}",
        code="connect_timeout" if isinstance(cause, TimeoutError) else "connection",
    )


def _bound_answers(url: str, limit_bytes: int) -> Callable[[httpx2.Response], Awaitable[None]]:
    async def bound_answer(answer: httpx2.Response) -> None:
        check_answer_head(answer.headers, url=url, limit_bytes=limit_bytes)
        answer.stream = _BoundedBody(answer.stream, url, limit_bytes)

    return bound_answer


class _BoundedBody(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, url: str, limit_bytes: int) -> None:
        self._stream = stream
        self._url = url
        self._limit_bytes = limit_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read_bytes = 0
        async for chunk in self._stream:
            read_bytes += len(chunk)
            if read_bytes > self._limit_bytes:
                raise answer_too_long(self._url, self._limit_bytes)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
