"""The common base of the clients that use the SDKs of OpenAI and Anthropic.

Both SDKs come from the same generator and use the same HTTP library. Must not: import either SDK.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import aiohttp
import httpx2

from pipeline.contract.errors import ModelError, ModelTransportError
from workers.llm.call_errors import HttpAnswer, answer_too_long, check_answer_head
from workers.llm.chat_client import CONNECT_TIMEOUT_S, KEEPALIVE_S, MAX_CONNECTIONS, ChatClient
from workers.llm.chat_stream import ChatStreamReader
from workers.llm.connections import shared_connection

#: The key for an endpoint that needs none. With an empty key the SDKs raise an error, or look for
#: credentials in the environment.
NO_KEY = "none"


class SdkClient(ChatClient):
    """A client that uses an SDK. All clients of a base URL, key and event loop share an SDK object.

    The SDK's own retries are disabled: `CallRetries` repeats calls.
    """

    #: The SDK's exceptions for an answer with an error status, and for a missing answer.
    _status_error: ClassVar[Any]
    _connection_error: ClassVar[Any]

    @abstractmethod
    def _make_sdk(self, **options: Any) -> Any:
        """Return the SDK's asynchronous client with these options."""

    async def _post(self, path: str, body: bytes, stream: ChatStreamReader | None) -> HttpAnswer:
        key = (type(self), self.base_url, self.api_key, self.max_answer_bytes)
        sdk = shared_connection(self, key, self._connect)
        try:
            answer = await sdk.client.post(
                path,
                cast_to=httpx2.Response,
                content=body,
                options={"headers": {**self._sdk_headers(), **self._headers}},
            )
        except self._status_error as error:
            answer = error.response
        # The SDK's transport does not map all protocol errors of aiohttp.
        except (self._connection_error, aiohttp.ClientError, OSError) as error:
            raise _transport_error(self._shown_url, error) from error
        return HttpAnswer(answer.status_code, answer.headers, answer.content)

    def _sdk_headers(self) -> dict[str, Any]:
        return {"Content-Type": "application/json", "Accept-Encoding": "identity"}

    def _connect(self) -> _SharedSdk:
        sdk = self._make_sdk(
            base_url=self.base_url,
            api_key=self.api_key or NO_KEY,
            max_retries=0,
            # `ChatClient` bounds the whole try; this timeout bounds only connecting.
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        )
        return _SharedSdk(sdk)

    def _http_options(self) -> dict[str, Any]:
        """Return the arguments of an SDK's aiohttp client: pool, no redirects, bounded answers."""
        return {
            "limits": httpx2.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S),
            # A redirect would send the prompt and the key to an unconfigured address.
            "follow_redirects": False,
            "event_hooks": {"response": [_bound_answers(self.endpoint, self.max_answer_bytes)]},
        }


class _SharedSdk:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def aclose(self) -> None:
        await self.client.close()


# The SDKs report any lost connection as a timeout, so the code comes from the underlying exception.
# A ModelError passes unchanged, also where the SDK has wrapped it.
def _transport_error(url: str, error: BaseException) -> ModelError:
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
