"""Requests and responses of a plain ASGI application: bodies, JSON, errors and streams.

The offline policy uses it. Must not: know the contents of an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from workers.llm.json_text import dump_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = (b"content-type", b"application/json")


async def read_body(receive: Receive) -> bytes:
    """Return a request's whole body."""
    message = await receive()
    if not message.get("more_body"):
        return message.get("body", b"")
    parts = [message.get("body", b"")]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def send_json(
    send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Answer with one JSON document."""
    data = dump_json(body)
    length = (b"content-length", str(len(data)).encode())
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [_JSON, length, *(headers or ())],
        }
    )
    await send({"type": "http.response.body", "body": data})


async def send_error(
    send: Send,
    status: int,
    message: str,
    code: str,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """Answer with an error in the OpenAI format."""
    error = {"message": message, "type": code, "param": None, "code": code}
    await send_json(send, status, {"error": error}, headers)


async def send_stream(send: Send, chunks: list[dict[str, Any]]) -> None:
    """Answer with server-sent events, one per chunk, and `[DONE]` at the end."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for chunk in chunks:
        data = b"data: " + dump_json(chunk) + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
