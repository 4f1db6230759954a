"""The official anthropic SDK against the gateway: the Messages API, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fixtures.served_model import Served, serving
from test_openai_sdk import IMAGE, STREAMED_CALLS, TOOL, TWO_CALLS

TOOLS = [
    {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "input_schema": TOOL["parameters"],
    }
]
USER = {"role": "user", "content": "Where is the sun?"}


@asynccontextmanager
async def connected(*answers: Any) -> AsyncIterator[tuple[Any, Served]]:
    import anthropic

    async with (
        serving(*answers) as served,
        anthropic.AsyncAnthropic(
            base_url=served.endpoint.anthropic_base_url,
            auth_token=served.endpoint.api_key,
            max_retries=0,
        ) as client,
    ):
        yield client, served


async def test_a_message_is_translated_both_ways():
    async with connected("Fine.") as (client, served):
        answer = await client.messages.create(
            model="m-1",
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief."}],
            messages=[USER],
            stop_sequences=["END"],
            metadata={"user_id": "u"},
        )
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.stop_reason, answer.usage.input_tokens) == ("end_turn", 3)
    sent = served.sent
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, USER]
    assert (sent["max_tokens"], sent["stop"]) == (9, ["END"])
    assert served.calls.calls[0].tokens is not None


async def test_tools_images_and_thinking_pass_both_ways():
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.rpartition(",")[2]}
    user = {
        "role": "user",
        "content": [{"type": "text", "text": "Where?"}, {"type": "image", "source": source}],
    }
    async with connected(TWO_CALLS, "Fine.") as (client, served):
        first = await client.messages.create(
            model="m-1",
            max_tokens=9,
            messages=[user],
            tools=TOOLS,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": f"call_{i}", "content": "Sun"} for i in (0, 1)
        ]
        blocks = [block.to_dict() for block in first.content]
        await client.messages.create(
            model="m-1",
            max_tokens=9,
            messages=[
                user,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
            ],
            tools=TOOLS,
        )
    asked = served.server.requests[0]
    assert asked["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": IMAGE}}
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    _, assistant, *results = served.sent["messages"]
    assert assistant["reasoning_content"] == "Two cities."
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [
        '{"city": "Bonn"}',
        '{"city": "Rome"}',
    ]
    assert [m["role"] for m in results] == ["tool", "tool", "user"]


@pytest.mark.parametrize("pieces", [True, False], ids=["in pieces", "whole"])
async def test_a_streamed_message_ends_as_the_whole_one(pieces: bool):
    # Anthropic's blocks come one after the other, so the calls are not interleaved here.
    calls = sorted(STREAMED_CALLS[3:], key=lambda delta: delta["tool_calls"][0]["index"])
    answer = [*STREAMED_CALLS[:3], *calls] if pieces else [TWO_CALLS]
    async with (
        connected(answer) as (client, served),
        client.messages.stream(model="m-1", max_tokens=9, messages=[USER]) as stream,
    ):
        final = await stream.get_final_message()
    thinking, first, second = final.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("Two cities.", "field:reasoning_content")
    assert first.type == second.type == "tool_use"
    assert (first.input, second.input) == ({"city": "Bonn"}, {"city": "Rome"})
    assert final.stop_reason == "tool_use"
    assert final.usage.input_tokens == 3
    assert len(served.calls.calls) == 1


async def test_pieces_of_calls_that_are_mixed_are_an_error_and_not_a_wrong_call():
    import anthropic

    mixed = [STREAMED_CALLS[3], STREAMED_CALLS[5], STREAMED_CALLS[4]]
    async with connected(mixed) as (client, served):
        with pytest.raises(anthropic.APIStatusError, match="several tool calls at once"):
            async with client.messages.stream(model="m-1", max_tokens=9, messages=[USER]) as stream:
                await stream.get_final_message()
    assert len(served.calls.calls) == 1, "it is recorded all the same"


async def test_streamed_text_comes_while_the_model_still_generates():
    async with connected([{"content": "Fi"}, None, {"content": "ne."}]) as (client, served):
        texts = []
        async with client.messages.stream(model="m-1", max_tokens=9, messages=[USER]) as stream:
            async for text in stream.text_stream:
                texts.append(text)
                served.server.go_on.set()
    assert texts == ["Fi", "ne."]


async def test_a_prompt_that_is_too_long_is_said_in_anthropics_words():
    import anthropic

    error = {"error": {"message": "maximum context length is 10 tokens", "code": 400}}
    async with connected((400, error)) as (client, _):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught:
            await client.messages.create(model="m-1", max_tokens=9, messages=[USER])
    assert caught.value.type == "invalid_request_error"
