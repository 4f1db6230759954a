from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.contract.errors import (
    ContextOverflow,
    ModelBadRequest,
    ModelRateLimit,
    ModelTransportError,
)

if TYPE_CHECKING:
    from workers.llm.anthropic_client import ClaudeAPIClient

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "computes",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}

THINKING = [
    {"type": "thinking", "thinking": "hmm", "signature": "c2lnbmVk"},
    {"type": "redacted_thinking", "data": "aGlkZGVu"},
]


def answer(*blocks: dict[str, Any], stop_reason: str = "end_turn") -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": list(blocks),
        "stop_reason": stop_reason,
        "usage": {"input_tokens": 9, "cache_read_input_tokens": 2, "output_tokens": 4},
    }


@pytest.fixture
def claude(endpoint: Any, waits: Any) -> ClaudeAPIClient:
    from workers.llm.anthropic_client import ClaudeAPIClient

    return ClaudeAPIClient(
        "sk-ant-planted",
        model="claude-x",
        base_url=endpoint.base_url,
        call_retries=waits.retries(max_retries=2),
    )


async def test_a_plain_question_is_asked_and_answered(
    endpoint: Any, claude: ClaudeAPIClient, ask: Any
) -> None:
    endpoint.answer(answer({"type": "text", "text": "42"}))
    response = await ask(claude, max_tokens=50, temperature=1.7, stop="END", seed=3)
    seen = endpoint.seen[0]
    assert seen.path == "/v1/messages"
    # Which header carries the key is the SDK's affair; it changed between its versions.
    assert "sk-ant-planted" in seen.headers.get("x-api-key", "") + seen.headers.get(
        "authorization", ""
    )
    assert seen.headers["anthropic-version"]
    assert seen.body == {
        "model": "claude-x",
        "max_tokens": 50,
        "temperature": 1.0,
        "stop_sequences": ["END"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 6 * 7?"}]}],
    }
    assert (response.text, response.finish_reason) == ("42", "stop")
    assert (response.prompt_tokens, response.completion_tokens) == (11, 4)


async def test_tool_calls_are_translated_both_ways(endpoint: Any, claude: ClaudeAPIClient) -> None:
    endpoint.answer(
        answer(
            *THINKING,
            {"type": "text", "text": "I compute."},
            {"type": "tool_use", "id": "tu_2", "name": "calculator", "input": {"expression": "1"}},
            stop_reason="tool_use",
        )
    )
    first = {
        "id": "tu_1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'},
    }
    broken = {"id": "tu_b", "type": "function", "function": {"name": "x", "arguments": "{oops"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6*7?"},
        {"role": "assistant", "content": None, "tool_calls": [first, broken]},
        {"role": "tool", "tool_call_id": "tu_1", "content": "42"},
        {"role": "tool", "tool_call_id": "tu_b", "content": "Error: not JSON"},
        {"role": "user", "content": "and 1?"},
    ]
    response = await claude.generate(messages, tools=[TOOL], tool_choice="required")
    body = endpoint.seen[0].body
    assert body["system"] == "Be brief."
    assert body["tools"] == [
        {
            "name": "calculator",
            "description": "computes",
            "input_schema": TOOL["function"]["parameters"],
        }
    ]
    assert body["tool_choice"] == {"type": "any"}
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == [
        {"type": "tool_use", "id": "tu_1", "name": "calculator", "input": {"expression": "6*7"}},
        {"type": "tool_use", "id": "tu_b", "name": "x", "input": {"arguments": "{oops"}},
    ]
    assert [block["type"] for block in body["messages"][2]["content"]] == [
        "tool_result",
        "tool_result",
        "text",
    ]
    assert response.text == "I compute."
    assert response.finish_reason == "tool_calls"
    assert response.metadata["reasoning"] == "hmm"
    (call,) = response.tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == (
        "tu_2",
        "calculator",
        {"expression": "1"},
    )
    assert response.to_message()["tool_calls"][0]["id"] == "tu_2"
    endpoint.answer(answer({"type": "text", "text": "1"}))
    result = {"role": "tool", "tool_call_id": "tu_2", "content": "1"}
    await claude.generate([*messages, response.to_message(), result], tools=[TOOL])
    # The API rejects a call whose signed thinking was left out or changed.
    assert endpoint.seen[1].body["messages"][3]["content"][:2] == THINKING


def error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


async def test_an_overload_is_repeated(endpoint: Any, claude: ClaudeAPIClient, ask: Any) -> None:
    endpoint.answer(error("overloaded_error", "Overloaded"), 529)
    endpoint.answer(answer({"type": "text", "text": "ok"}))
    response = await ask(claude)
    assert (response.text, response.metadata["retries"]) == ("ok", 1)


@pytest.mark.parametrize(
    ("status", "body", "expected", "code"),
    [
        (
            400,
            error("invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
            ContextOverflow,
            "context_overflow",
        ),
        (400, error("invalid_request_error", "bad tools"), ModelBadRequest, "http_400"),
        (401, error("authentication_error", "bad key"), ModelBadRequest, "http_401"),
        (429, error("rate_limit_error", "slow"), ModelRateLimit, "http_429"),
        (500, error("api_error", "oops"), ModelTransportError, "http_500"),
        (200, {"type": "message"}, ModelBadRequest, "malformed_response"),
        (200, error("overloaded_error", "Overloaded"), ModelTransportError, "error_body"),
    ],
)
async def test_errors_are_those_of_every_client(
    status: int,
    body: Any,
    expected: type[Exception],
    code: str,
    endpoint: Any,
    claude: ClaudeAPIClient,
    ask: Any,
) -> None:
    endpoint.answer(body, status)
    with pytest.raises(expected) as caught:
        await ask(claude)
    assert getattr(caught.value, "code", None) == code


async def test_a_broken_connection_is_a_transport_error(
    endpoint: Any, claude: ClaudeAPIClient, ask: Any
) -> None:
    endpoint.script.append(b"")
    with pytest.raises(ModelTransportError) as caught:
        await ask(claude)
    assert caught.value.code == "connection"
