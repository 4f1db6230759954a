"""Requests that come twice, and clients that leave: each call is made and recorded once."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from fixtures.served_model import Served, serving

USER = {"role": "user", "content": "Hi"}
CALL = {"model": "m-1", "messages": [USER]}


async def post(served: Served, body: Any = CALL, **headers: str) -> tuple[int, Any]:
    sent = {"authorization": f"Bearer {served.endpoint.api_key}", **headers}
    url = f"{served.endpoint.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=sent) as answer,
    ):
        if answer.content_type == "application/json":
            body = await answer.json()
            return answer.status, body.get("choices", [{}])[0].get("message", {}).get("content")
        return answer.status, (await answer.read()).decode()


REPEAT = {"x-stainless-retry-count": "1"}


async def test_a_repeated_request_gets_the_recorded_answer():
    async with serving("one", "two") as served:
        assert await post(served) == (200, "one")
        assert await post(served, **REPEAT) == (200, "one")
        assert await post(served) == (200, "two"), "an equal request is another call"
        assert await post(served, {**CALL, "seed": 1}, **REPEAT) == (200, "two")
        assert len(served.calls.calls) == 3


async def test_parallel_equal_requests_are_different_calls():
    async with serving("a", "b", "c") as served:
        answers = await asyncio.gather(*(post(served) for _ in range(3)))
    assert sorted(text for _, text in answers) == ["a", "b", "c"]


async def test_an_idempotency_key_recognises_a_request_and_refuses_another():
    key = {"idempotency-key": "k1"}
    async with serving("one", "two") as served:
        assert await post(served, **key) == (200, "one")
        assert await post(served, **key) == (200, "one")
        assert (await post(served, {**CALL, "seed": 1}, **key))[0] == 400
        assert await post(served, **{"idempotency-key": "k2"}) == (200, "two")


async def test_the_repetition_of_a_failed_call_is_a_new_call():
    failure = (400, {"error": {"message": "no"}})
    async with serving("one", failure, "three") as served:
        assert await post(served) == (200, "one")
        assert (await post(served))[0] == 400
        assert await post(served, **REPEAT) == (200, "three"), "not the answer of its equal"


async def test_a_call_whose_client_left_is_recorded_and_given_again():
    asked = {**CALL, "stream": True}
    async with serving([{"content": "on"}, None, {"content": "e"}], "two") as served:
        sent = {"authorization": f"Bearer {served.endpoint.api_key}"}
        url = f"{served.endpoint.base_url}/chat/completions"
        async with aiohttp.ClientSession() as session:
            answer = await session.post(url, json=asked, headers=sent)
            assert b'"content":"on"' in await answer.content.readany()
            answer.close()
        again = asyncio.create_task(post(served, asked, **REPEAT))
        served.server.go_on.set()
        _, events = await again
        assert events.count('"content":') == 2, "both pieces"
        assert events.endswith("data: [DONE]\n\n")
        assert [call.response for call in served.calls.calls] == [
            {"role": "assistant", "content": "one"}
        ]


async def test_an_sdk_that_timed_out_gets_the_answer_by_its_retry():
    import openai

    async with serving([None, {"content": "late"}], "second") as served:
        client = openai.AsyncOpenAI(
            base_url=served.endpoint.base_url,
            api_key=served.endpoint.api_key,
            timeout=0.5,
            max_retries=3,
        )

        async def let_go() -> None:
            await served.server.arrived.wait()
            await asyncio.sleep(0.7)  # longer than the client's timeout
            served.server.go_on.set()

        letting = asyncio.create_task(let_go())
        stream = await client.chat.completions.create(stream=True, **CALL)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await letting
        await client.close()
    assert text == "late"
    assert len(served.server.requests) == 1


@pytest.mark.parametrize("end", ["break", {"error": {"message": "overloaded", "code": 503}}])
async def test_a_stream_that_breaks_off_is_an_error_and_is_not_repeated(end: Any):
    import openai

    async with serving([{"content": "on"}, end], "whole") as served:
        client = openai.AsyncOpenAI(
            base_url=served.endpoint.base_url, api_key=served.endpoint.api_key
        )
        stream = await client.chat.completions.create(stream=True, **CALL)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
        await client.close()
        assert len(served.server.requests) == 1
        assert served.calls.failure is not None
        assert served.calls.calls == []


async def test_calls_of_a_sub_agent_are_recorded_under_its_name():
    async with serving("x") as served:
        key = served.endpoint.for_agent("searcher").api_key
        await post(served)
        await post(served, authorization=f"Bearer {key}")
        await post(served, **{"x-rollout-agent": "critic"})
    assert [call.agent for call in served.calls.calls] == ["", "searcher", "critic"]
