"""The server is asked once which kind it is; ids are asked for only where it knows the fields."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from workers.llm.server_kind import ServerKinds

VLLM = {"/version": (200, '{"version": "0.10.2"}')}
SGLANG = {"/get_server_info": (200, '{"model_path": "qwen"}')}


@asynccontextmanager
async def server(paths: Mapping[str, tuple[int, str]]) -> AsyncIterator[tuple[str, Counter[str]]]:
    """Serve texts by path; yields the base URL and the number of requests by path."""
    asked: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        asked[request.path] += 1
        status, text = paths.get(request.path, (404, "not here"))
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/v1", asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("paths", "kind"),
    [
        (VLLM, "vllm"),
        (SGLANG, "sglang"),
        ({**VLLM, **SGLANG}, "sglang"),
        ({}, "openai"),
        ({"/version": (200, "<html>")}, "openai"),
        ({"/version": (200, '["1"]')}, "openai"),
        ({"/version": (302, "")}, "openai"),
        ({"/version": (501, "")}, "openai"),
    ],
)
async def test_a_server_is_known_by_what_its_root_answers(paths, kind):
    async with server(paths) as (base_url, _):
        assert await ServerKinds().find(base_url) == kind


async def test_a_server_is_asked_once_by_any_number_of_calls():
    async with server(VLLM) as (base_url, asked):
        kinds = ServerKinds()
        found = await asyncio.gather(*(kinds.find(base_url) for _ in range(50)))
        assert set(found) == {"vllm"}
        assert await kinds.find(base_url) == "vllm"
        assert asked["/version"] == 1


async def test_a_failed_question_is_asked_again_later_and_not_before():
    now = [0.0]
    paths: dict[str, tuple[int, str]] = {"/version": (503, "starting")}
    async with server(paths) as (base_url, asked):
        kinds = ServerKinds(clock=lambda: now[0])
        assert await kinds.find(base_url) is None
        paths.update(VLLM)
        assert await kinds.find(base_url) is None
        assert asked["/version"] == 1
        now[0] += 31
        assert await kinds.find(base_url) == "vllm"


async def test_a_server_that_is_not_there_has_no_kind_yet():
    assert await ServerKinds().find("http://127.0.0.1:9/v1") is None
