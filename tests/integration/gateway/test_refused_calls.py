"""Requests that the gateway refuses: each gets an answer that its SDK understands."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import aiohttp
import pytest
from fixtures.served_model import KEY, Served, serving
from pydantic import SecretStr

from pipeline.limits.local_pause import LocalPauses
from pipeline.queue.gateway_keys import GatewayKeys
from pipeline.settings import Settings
from pipeline.settings.sections import BrokerSettings, GatewaySettings
from workers.process.unclocked_limiter import UnclockedLimiter

CALL = {"model": "m-1", "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/chat/completions"


async def post(
    served: Served, body: Any, *, path: str = PATH, **headers: str
) -> tuple[int, dict[str, Any], Any]:
    """Send a request and return status, error and headers of the answer."""
    sent = {"authorization": f"Bearer {served.endpoint.api_key}", **headers}
    payload: Any = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{served.endpoint.base_url}{path}", headers=sent, **payload) as answer,
    ):
        return answer.status, (await answer.json()).get("error"), answer.headers


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (b"{not json", 400, "invalid_request", "not JSON"),
        (b"[1]", 400, "invalid_request", "a JSON object"),
        ({**CALL, "messages": "Hi"}, 400, "invalid_request", "`messages`"),
        ({**CALL, "messages": []}, 400, "invalid_request", "must not be empty"),
        ({**CALL, "tools": [1]}, 400, "invalid_request", "`tools`"),
        ({**CALL, "n": 2}, 400, "invalid_request", "`n` must be 1"),
        ({"messages": CALL["messages"]}, 400, "invalid_request", "`model`"),
        ({**CALL, "model": "gpt-9"}, 404, "model_not_found", "'m-1'"),
    ],
)
async def test_bad_input_names_what_is_wrong_and_calls_no_model(body, status, code, words):
    async with serving("x") as served:
        answered, error, headers = await post(served, body)
        assert (answered, error["code"]) == (status, code)
        assert words in error["message"]
        assert headers["x-should-retry"] == "false"
        assert served.server.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", {"model": "m-1", "input": "Hi", "previous_response_id": "resp_1"}),
        ("/responses", {"model": "m-1", "input": [{"type": "item_reference", "id": "m"}]}),
        ("/responses", {"model": "m-1", "input": "Hi", "tools": [{"type": "web_search"}]}),
        ("/completions", {"model": "m-1", "prompt": ["a", "b"]}),
        ("/completions", {"model": "m-1"}),
        ("/messages", {**CALL, "tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("/messages", {**CALL, "messages": [{"role": "robot", "content": "Hi"}]}),
    ],
)
async def test_what_no_model_server_can_do_is_refused(path, body):
    async with serving("x") as served:
        status, error, _ = await post(served, body, path=path)
    assert status == 400, error


async def test_a_hundred_megabytes_are_refused_before_they_are_read():
    async with serving(
        "x", settings=Settings(gateway=GatewaySettings(max_body_bytes=2048))
    ) as served:
        status, error, _ = await post(served, b"x" * 100_000_000)
        assert (status, error["code"]) == (413, "request_too_large")

        async def chunks():
            for _ in range(100):
                yield b"x" * 1000

        sent = {"authorization": f"Bearer {served.endpoint.api_key}"}
        url = f"{served.endpoint.base_url}{PATH}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=chunks(), headers=sent) as answer,
        ):
            assert answer.status == 413, "also without a length"


@pytest.mark.parametrize("key", ["", "sk-other", "rpk-e30.00", "rpk-€.1"])
async def test_a_wrong_key_is_refused(key: str):
    async with serving("x") as served:
        status, error, _ = await post(served, CALL, authorization=f"Bearer {key}")
        assert (status, error["code"]) == (401, "invalid_api_key")


async def test_keys_are_of_this_deployment_this_time_and_this_attempt():
    settings = Settings(broker=BrokerSettings(signing_key=SecretStr("of all processes")))
    now = int(time.time())
    fresh = KEY.model_copy(update={"expires_at": now + 60})
    over = KEY.model_copy(update={"expires_at": now - 1})
    other = fresh.model_copy(update={"attempt_no": 2})
    ours, theirs = GatewayKeys(b"of all processes"), GatewayKeys(b"of others")
    async with serving("x", settings=settings) as served:
        for key, status in (
            (ours.write(fresh), 200),
            (theirs.write(fresh), 401),
            (ours.write(over), 401),
            (ours.write(other), 409),
        ):
            answered, *_ = await post(served, CALL, authorization=f"Bearer {key}")
            assert answered == status


async def test_the_end_of_the_attempt_ends_its_calls():
    import openai

    async with serving([None]) as served:
        client = openai.AsyncOpenAI(
            base_url=served.endpoint.base_url, api_key=served.endpoint.api_key
        )
        stream = client.chat.completions.create(model="m-1", messages=CALL["messages"], stream=True)
        (attempt,) = served.gateway._attempts.values()

        async def end_it() -> None:
            await served.server.arrived.wait()
            attempt.close()

        with pytest.raises(openai.ConflictError, match="has ended"):
            await asyncio.gather(stream, end_it())
        status, error, _ = await post(served, CALL)
        assert (status, error["code"]) == (409, "attempt_over")
        await client.close()
    assert served.calls.calls == []


async def test_errors_of_the_model_keep_their_meaning():
    too_long = {"error": {"message": "maximum context length is 10", "code": "x"}}
    async with serving((400, too_long)) as served:
        status, error, _ = await post(served, CALL)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        served.server.answers = [(401, {"error": {"message": "no key"}})]
        status, error, _ = await post(served, CALL)
        assert status == 502, "the model's key is not the agent's concern"
        served.server.answers = [(422, {"error": {"message": "seed must be a number"}})]
        status, error, _ = await post(served, CALL)
        assert (status, "seed must be a number" in error["message"]) == (422, True)


async def test_a_call_that_waits_too_long_for_its_limits_is_told_to_come_again():
    pause = LocalPauses().for_run("http://m/v1", "m-1", run="math7", weight=1.0)
    for _ in range(50):
        pause.note_rate_limited(60)  # the endpoint answers nothing but 429
    settings = Settings(gateway=GatewaySettings(limit_wait_s=0.05))
    async with serving("x", settings=settings, limiter=UnclockedLimiter(pause)) as served:
        status, error, headers = await post(served, CALL)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert (headers["retry-after"], headers["x-should-retry"]) == ("5", "true")
        assert served.server.requests == []


async def test_an_unknown_path_names_the_known_ones():
    async with serving("x") as served:
        status, error, _ = await post(served, CALL, path="/embeddings")
    assert status == 404
    assert "/v1/responses" in error["message"]
