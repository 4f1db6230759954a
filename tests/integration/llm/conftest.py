"""A scripted HTTP endpoint on a free port, and clients that leave nothing open behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.core.model_response import ModelResponse
from workers.llm.call_retries import CallRetries, CallRetryPolicy
from workers.llm.chat_client import ChatClient
from workers.llm.connections import close_connections


@dataclass
class Seen:
    """One request the endpoint got."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Endpoint:
    """Answers requests from a script of raw HTTP answers; the last one is repeated."""

    script: list[bytes] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    base_url: str = ""
    hang: asyncio.Event | None = None  # set: answers wait for it
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        self.script.append(http_answer(body, status, **headers))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = request.split(" ")
        self.seen.append(Seen(method, path, headers, json.loads(body) if body else None))
        if self.hang is not None:
            await self.hang.wait()
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        writer.write(answer)
        await writer.drain()
        return b"connection: close" not in answer and answer != b""


def http_answer(body: Any, status: int = 200, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}"]
    if not any(name.lower() == "content_type" for name in headers):
        lines.append("content-type: application/json")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@asynccontextmanager
async def _served(port: int = 0) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", port)
    endpoint.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    yield endpoint
    await close_connections()
    server.close()
    for task in endpoint.tasks:
        task.cancel()
    await asyncio.gather(*endpoint.tasks, return_exceptions=True)
    await server.wait_closed()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with _served() as endpoint:
        yield endpoint


@pytest.fixture
def serve() -> Callable[..., Any]:
    """Serve further endpoints, each in a context of its own: its end is the server's end."""
    return _served


@dataclass
class Waits:
    """Records waits instead of waiting; time passes by them alone."""

    slept_s: list[float] = field(default_factory=list)
    now_s: float = 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def retries(self, **policy: Any) -> CallRetries:
        return CallRetries(
            CallRetryPolicy(**policy), sleep=self.sleep, jitter=lambda: 1.0, clock=self.clock
        )

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def completion() -> Callable[..., dict[str, Any]]:
    return chat_completion


def chat_completion(text: str | None = "42", **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **choice.pop("message", {})}
    top = choice.pop("top", {})
    return {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1,
        "model": "m-2",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message, **choice}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
        **top,
    }


@pytest.fixture(params=["openai", "lean"])
def connect(request: pytest.FixtureRequest, waits: Waits) -> Callable[..., ChatClient]:
    """Make one of the OpenAI-compatible clients; every test runs with each."""
    if request.param == "openai":
        from workers.llm.openai_client import OpenAIClient as Client
    else:
        from workers.llm.lean_client import LeanClient as Client

    def make(base_url: str, api_key: str | None = "sk-planted", **options: Any) -> ChatClient:
        policy = options.pop("policy", {"max_retries": 3})
        options.setdefault("call_retries", waits.retries(**policy))
        return Client(base_url, api_key, **{"model": "m-1", **options})

    return make


async def ask(client: ChatClient, text: str = "What is 6 * 7?", **options: Any) -> ModelResponse:
    return await client.generate([{"role": "user", "content": text}], **options)


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., Any]:
    return ask
