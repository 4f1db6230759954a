"""The official openai SDK against the gateway: chat completions and responses, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fixtures.served_model import Served, serving

TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def call(index: int, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": f'{{"city": "{city}"}}'}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


TWO_CALLS = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Two cities.",
    "tool_calls": [call(0, "Bonn"), call(1, "Rome")],
}
#: The same message in pieces, as servers stream it.
STREAMED_CALLS = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Two "},
    {"reasoning_content": "cities."},
    {"tool_calls": [call(0, "")]},
    {"tool_calls": [call(1, "Rome")]},
]
STREAMED_CALLS[3]["tool_calls"][0]["function"]["arguments"] = '{"city":'
STREAMED_CALLS.insert(4, {"tool_calls": [{"index": 0, "function": {"arguments": ' "Bonn"}'}}]})


@asynccontextmanager
async def connected(*answers: Any) -> AsyncIterator[tuple[Any, Served]]:
    import openai

    async with serving(*answers) as served:
        endpoint = served.endpoint
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            yield client, served


USER = {"role": "user", "content": "What is the weather?"}


async def test_a_chat_answer_is_recorded_with_its_token_ids():
    async with connected("Fine.") as (client, served):
        answer = await client.chat.completions.create(
            model="m-1", messages=[USER], max_completion_tokens=9, seed=3, store=False
        )
    assert answer.choices[0].message.content == "Fine."
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    sent = served.sent
    assert (sent["messages"], sent["max_tokens"], sent["seed"]) == ([USER], 9, 3)
    assert "store" not in sent
    (recorded,) = served.calls.calls
    assert recorded.tokens is not None
    assert recorded.trainable


async def test_chat_tool_calls_images_and_reasoning_pass_both_ways():
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    user = {"role": "user", "content": [{"type": "text", "text": "Where?"}, image]}
    async with connected(TWO_CALLS, "Fine.") as (client, served):
        tools = [{"type": "function", "function": TOOL}]
        answer = await client.chat.completions.create(model="m-1", messages=[user], tools=tools)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [c.function.arguments for c in message.tool_calls or ()] == [
            '{"city": "Bonn"}',
            '{"city": "Rome"}',
        ]
        assert message.model_extra == {"reasoning_content": "Two cities."}
        results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "Sun"} for i in (0, 1)]
        await client.chat.completions.create(
            model="m-1", messages=[user, message.to_dict(), *results], tools=tools
        )
    assert served.server.requests[0]["messages"] == [user]
    again = served.sent["messages"][1]
    assert again["reasoning_content"] == "Two cities."
    assert [c["id"] for c in again["tool_calls"]] == ["call_0", "call_1"]


async def test_the_first_chat_chunk_comes_while_the_model_still_generates():
    async with connected([{"content": "Fi"}, None, {"content": "ne."}]) as (client, served):
        stream = await client.chat.completions.create(
            model="m-1",
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [await anext(stream)]
        assert chunks[0].choices[0].delta.content == "Fi"
        assert served.calls.calls == [], "the model has not ended its answer"
        served.server.go_on.set()
        chunks += [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Fine."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    (recorded,) = served.calls.calls
    assert recorded.response == {"role": "assistant", "content": "Fine."}
    assert recorded.tokens is not None


async def test_streamed_parallel_tool_calls_come_whole():
    async with (
        connected(STREAMED_CALLS) as (client, served),
        client.chat.completions.stream(model="m-1", messages=[USER]) as stream,
    ):
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert [(c.id, c.function.arguments) for c in message.tool_calls or ()] == [
        ("call_0", '{"city": "Bonn"}'),
        ("call_1", '{"city": "Rome"}'),
    ]
    assert (served.calls.calls[0].response or {})["reasoning_content"] == "Two cities."


async def test_a_response_has_items_for_reasoning_text_and_calls():
    async with connected(TWO_CALLS, "Fine.") as (client, served):
        tools = [{"type": "function", **TOOL, "strict": False}]
        first = await client.responses.create(
            model="m-1", instructions="Be brief.", input="Where?", tools=tools
        )
        assert [item.type for item in first.output] == [
            "reasoning",
            "function_call",
            "function_call",
        ]
        outputs = [
            {"type": "function_call_output", "call_id": f"call_{i}", "output": "Sun"}
            for i in (0, 1)
        ]
        items = [item.to_dict() for item in first.output]
        second = await client.responses.create(
            model="m-1",
            instructions="Be brief.",
            input=[{"role": "user", "content": "Where?"}, *items, *outputs],
            tools=tools,
            max_output_tokens=50,
            text={"format": {"type": "json_object"}},
        )
    assert second.output_text == "Fine."
    assert second.status == "completed"
    assert second.usage is not None
    assert second.usage.total_tokens == 5
    sent = served.sent
    assert [m["role"] for m in sent["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert sent["messages"][2]["reasoning_content"] == "Two cities."
    assert [c["id"] for c in sent["messages"][2]["tool_calls"]] == ["call_0", "call_1"]
    assert sent["tools"][0]["function"]["name"] == "weather"
    assert (sent["max_tokens"], sent["response_format"]) == (50, {"type": "json_object"})


async def test_a_response_takes_images():
    async with connected("A dot.") as (client, served):
        content = [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": IMAGE, "detail": "low"},
        ]
        await client.responses.create(model="m-1", input=[{"role": "user", "content": content}])
    assert served.sent["messages"][0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
    ]


@pytest.mark.parametrize("pieces", [True, False], ids=["in pieces", "whole"])
async def test_a_streamed_response_ends_as_the_whole_one(pieces: bool):
    answer = STREAMED_CALLS if pieces else [TWO_CALLS]
    async with (
        connected(answer) as (client, _),
        client.responses.stream(model="m-1", input="Where?") as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    calls = [item for item in final.output if item.type == "function_call"]
    assert [c.arguments for c in calls] == ['{"city": "Bonn"}', '{"city": "Rome"}']
    reasoning = final.output[0]
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["Two cities."]


async def test_streamed_response_text_comes_while_the_model_still_generates():
    async with connected([{"content": "Fi"}, None, {"content": "ne."}]) as (client, served):
        texts = []
        stream = await client.responses.create(model="m-1", input="How?", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
                served.server.go_on.set()
            if event.type == "response.completed":
                assert event.response.output_text == "Fine."
    assert texts == ["Fi", "ne."]


@pytest.mark.parametrize("prompt", ["Once", [5, 6, 7]])
async def test_a_text_completion_goes_on_without_a_chat_template(prompt: Any):
    async with connected("upon", [{"content": "up"}, {"content": "on"}]) as (client, served):
        whole = await client.completions.create(model="m-1", prompt=prompt, max_tokens=4)
        stream = await client.completions.create(model="m-1", prompt=prompt, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert (whole.choices[0].text, pieces) == ("upon", ["up", "on", ""])
    assert all(sent["prompt"] == prompt for sent in served.server.requests)
    assert all("messages" not in sent for sent in served.server.requests)
    for call in served.calls.calls:
        assert call.tokens is not None
        assert call.tokens.logprobs is not None
        assert "prompt" not in call.sampling


async def test_the_models_are_listed():
    async with connected("x") as (client, _):
        assert [model.id async for model in client.models.list()] == ["m-1"]
        assert (await client.models.retrieve("m-1")).id == "m-1"
