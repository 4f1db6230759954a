"""Failures that every client repeats: when it waits, when it gives up, what its limiter is told."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from pipeline.contract.errors import (
    ModelRateLimit,
    ModelTransportError,
)


@pytest.mark.parametrize("status", [408, 500, 502, 503, 529])
async def test_a_failure_that_may_pass_is_repeated(
    status: int, endpoint: Any, connect: Any, completion: Any, ask: Any, waits: Any
) -> None:
    endpoint.answer({"error": {"message": "not now"}}, status)
    endpoint.answer(b"<html>bad gateway</html>", status, content_type="text/html")
    endpoint.answer(completion("42"))
    response = await ask(connect(endpoint.base_url))
    assert response.text == "42"
    assert waits.slept_s == [0.5, 1.0]
    assert response.metadata["retries"] == 2
    assert response.metadata["waited_s"] == 1.5


@pytest.mark.parametrize(
    ("headers", "asked_s"),
    [({"retry_after": "4"}, 4.0), ({"retry_after_ms": "250", "retry_after": "9"}, 0.25)],
)
async def test_a_rate_limit_waits_as_long_as_the_server_asks(
    headers: dict[str, str],
    asked_s: float,
    endpoint: Any,
    connect: Any,
    completion: Any,
    ask: Any,
    waits: Any,
) -> None:
    endpoint.answer({"error": {"message": "slow down"}}, 429, **headers)
    endpoint.answer(completion())
    response = await ask(connect(endpoint.base_url))
    assert asked_s <= waits.slept_s[0] <= 1.2 * asked_s + 0.05
    assert response.metadata["rate_limit_wait_s"] == pytest.approx(waits.slept_s[0], abs=0.2)


async def test_a_wait_beyond_the_budget_is_handed_to_the_pipeline(
    endpoint: Any, connect: Any, ask: Any, waits: Any
) -> None:
    endpoint.answer({"error": {"message": "slow down"}}, 429, retry_after="600")
    with pytest.raises(ModelRateLimit, match="slow down") as caught:
        await ask(connect(endpoint.base_url))
    assert caught.value.retry_after_s == 600
    assert waits.slept_s == []


async def test_retries_end_by_count(endpoint: Any, connect: Any, ask: Any, waits: Any) -> None:
    endpoint.answer({"error": {"message": "down"}}, 503)
    with pytest.raises(ModelTransportError, match="gave up after 4 tries") as caught:
        await ask(connect(endpoint.base_url))
    assert caught.value.code == "http_503"
    assert len(endpoint.seen) == 4


async def test_retries_end_by_time(endpoint: Any, connect: Any, ask: Any, waits: Any) -> None:
    endpoint.answer({"error": {"message": "down"}}, 503)
    policy = {"max_retries": 100, "budget_s": 20.0, "max_s": 8.0}
    with pytest.raises(ModelTransportError):
        await ask(connect(endpoint.base_url, policy=policy))
    assert sum(waits.slept_s) <= 20


@pytest.mark.parametrize(
    "answer",
    [
        b"",  # closed without a word
        b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\nconnection: close\r\n\r\n{",  # cut off
        b"not http at all\r\n\r\n",
    ],
)
async def test_a_broken_connection_is_a_transport_error_and_repeated(
    answer: bytes, endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.script.append(answer)
    endpoint.answer(completion("42"))
    response = await ask(connect(endpoint.base_url))
    assert (response.text, response.metadata["retries"]) == ("42", 1)


async def test_nobody_listening_is_a_transport_error(connect: Any, ask: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        client = connect(base_url, policy={"max_retries": 1})
        with pytest.raises(ModelTransportError, match="gave up after 2 tries") as caught:
            await ask(client)
        await client.aclose()
    assert caught.value.code == "connection"


async def test_a_server_that_never_answers_times_out(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion())
    endpoint.hang = asyncio.Event()
    with pytest.raises(ModelTransportError, match=r"within 0\.05 s") as caught:
        await ask(connect(endpoint.base_url, timeout_s=0.05, policy={"max_retries": 0}))
    assert caught.value.code == "timeout"


class RecordingLimiter:
    def __init__(self) -> None:
        self.acquired: list[int] = []
        self.settled: list[int] = []
        self.rate_limited: list[float | None] = []

    async def acquire(self, estimated_tokens: int) -> RecordingLimiter:
        self.acquired.append(estimated_tokens)
        return self

    def settle(self, actual_tokens: int, outcome: str) -> None:
        self.settled.append(actual_tokens)

    async def note_rate_limited(self, retry_after_s: float | None) -> None:
        self.rate_limited.append(retry_after_s)


async def test_every_try_asks_the_limiter_and_settles_with_it(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer({"error": {"message": "slow"}}, 429, retry_after="2")
    endpoint.answer(b"", 500)
    endpoint.answer(completion())
    limiter = RecordingLimiter()
    await ask(connect(endpoint.base_url, limiter=limiter), "x" * 4000, max_tokens=100)
    assert len(limiter.acquired) == 3
    assert 1100 <= limiter.acquired[0] <= 1200
    assert limiter.settled == [0, 0, 14]
    assert limiter.rate_limited == [2.0]
