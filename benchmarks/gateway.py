"""Measures what the gateway adds to a model call, and 500 streams at once in one gateway.

`python -m benchmarks gateway` runs it. The gateway is a process of its own, in front of the mock
server; the callers use the openai SDK. Direct calls and calls through the gateway alternate. Must
not print.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from benchmarks.mock_server import ROOT, MockServer
from benchmarks.process_tree import cpu_s
from benchmarks.report import Figure
from pipeline.queue.gateway_keys import GatewayKey, GatewayKeys

if TYPE_CHECKING:
    import openai

_SECRET = "of the benchmark"
_MODEL = "mock"
_CALLS = 400
_AT_ONCE = 16
_LATENCY_CALLS = 150
_STREAMS = 500
_CHUNKS, _CHUNK_S = 20, 0.25


async def measure_gateway(*, pairs: int) -> list[Figure]:
    """Measure CPU and latency by call, and the time to the first piece with 500 streams."""
    import openai  # every command of the benchmarks imports this module

    with MockServer() as mock, _gateway(mock.base_url) as (pid, base_url):
        direct = openai.AsyncOpenAI(base_url=mock.base_url, api_key="x", max_retries=0)
        through = openai.AsyncOpenAI(base_url=base_url, api_key=_key(), max_retries=0)
        async with direct, through:
            for client in (direct, through):
                await _calls(client, 50)
            figures = await _cpu(direct, through, pid, pairs)
            figures += await _latency(direct, through)
    async with _stream_server() as model_url:
        with _gateway(model_url) as (pid, base_url):
            figures += await _streams(base_url, pid)
    return figures


async def _cpu(
    direct: openai.AsyncOpenAI, through: openai.AsyncOpenAI, pid: int, pairs: int
) -> list[Figure]:
    ratios: list[float] = []
    gateway_us: list[float] = []
    for _ in range(pairs):
        before = time.process_time()
        await _calls(direct, _CALLS)
        direct_s = time.process_time() - before
        before, gateway_before = time.process_time(), cpu_s(pid)
        await _calls(through, _CALLS)
        gateway_s = cpu_s(pid) - gateway_before
        added_s = time.process_time() - before + gateway_s - direct_s
        ratios.append(added_s / direct_s)
        gateway_us.append(gateway_s / _CALLS * 1e6)
    note = f"{median(gateway_us):.0f} us in the gateway; {pairs} pairs of {_CALLS} calls"
    name = "gateway: added CPU per call / a direct call by the openai SDK"
    return [Figure("G17", name, median(ratios), "", 1.3, None, True, note)]


async def _latency(direct: openai.AsyncOpenAI, through: openai.AsyncOpenAI) -> list[Figure]:
    added_ms: list[float] = []
    for _ in range(_LATENCY_CALLS):
        took = []
        for client in (direct, through):
            started = time.perf_counter()
            await _calls(client, 1)
            took.append(time.perf_counter() - started)
        added_ms.append((took[1] - took[0]) * 1000)
    note = f"median of {_LATENCY_CALLS} pairs, one call at a time"
    return [
        Figure("G17", "gateway: added latency p50", median(added_ms), "ms", 3.0, None, True, note)
    ]


async def _streams(base_url: str, pid: int) -> list[Figure]:
    cpu_before = cpu_s(pid)
    connector = aiohttp.TCPConnector(limit=_STREAMS)
    async with aiohttp.ClientSession(connector=connector) as session:
        started = time.perf_counter()
        work = (_stream(session, f"{base_url}/chat/completions") for _ in range(_STREAMS))
        firsts = await asyncio.gather(*work)
        wall_s = time.perf_counter() - started
    used_s = cpu_s(pid) - cpu_before
    generating_s = _CHUNKS * _CHUNK_S
    note = f"{wall_s:.1f} s in all, of which the model takes {generating_s:g} s"
    name = f"{_STREAMS} streams at once: first piece, p50"
    return [
        Figure("", name, median(firsts), "s", generating_s, None, True, note),
        Figure("", "CPU of the gateway per piece", used_s / _STREAMS / _CHUNKS * 1e6, "us"),
    ]


async def _stream(session: aiohttp.ClientSession, url: str) -> float:
    """Read one stream with little work, because all readers share a process."""
    started = time.perf_counter()
    first_s, pieces = 0.0, 0
    headers = {"authorization": f"Bearer {_key()}"}
    async with session.post(url, json={**_request(), "stream": True}, headers=headers) as answer:
        async for line in answer.content:
            if b'"content":"word' in line:
                first_s = first_s or time.perf_counter() - started
                pieces += 1
    assert pieces == _CHUNKS, f"a stream had {pieces} pieces"
    return first_s


async def _calls(client: openai.AsyncOpenAI, count: int) -> None:
    places = asyncio.Semaphore(_AT_ONCE)

    async def call() -> None:
        async with places:
            await client.chat.completions.create(**_request())

    await asyncio.gather(*(call() for _ in range(count)))


def _request() -> dict[str, Any]:
    text = "What is 17 * 3? " * 40
    return {"model": _MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 64}


def _key() -> str:
    key = GatewayKey(
        run_id=uuid.UUID(int=1),
        run="bench",
        group_id=uuid.uuid4(),
        rollout_id=uuid.uuid4(),
        attempt_no=1,
        label="bench-g000000-r0-a1",
        expires_at=int(time.time()) + 3600,
        model=_MODEL,
    )
    return GatewayKeys(_SECRET.encode()).write(key)


@contextmanager
def _gateway(model_url: str) -> Iterator[tuple[int, str]]:
    """Run `rollout gateway`; yields its pid and base URL."""
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": model_url,
            "ROLLOUT_BROKER__SIGNING_KEY": _SECRET,
            "ROLLOUT_DATA_DIR": folder,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout", "gateway", "--port", "0", "--json", "--while-stdin"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        try:
            yield process.pid, json.loads(process.stdout.readline())["base_url"]
        finally:
            process.terminate()
            process.communicate(timeout=60)


@asynccontextmanager
async def _stream_server() -> AsyncIterator[str]:
    """Serve streams that generate one piece every quarter of a second."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(_CHUNKS):
            await asyncio.sleep(_CHUNK_S)
            choice = {"index": 0, "delta": {"content": f"word {number} "}, "finish_reason": None}
            await response.write(_event({"id": "c", "model": _MODEL, "choices": [choice]}))
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        await response.write(_event({"id": "c", "model": _MODEL, "choices": [last]}))
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
