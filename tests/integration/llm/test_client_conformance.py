"""What every OpenAI-compatible client does: one suite for the SDK's and the lean one."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.contract.errors import (
    ConfigError,
    ContextOverflow,
    ModelBadRequest,
    ModelError,
    ModelRateLimit,
    ModelTransportError,
)

TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


async def test_an_answer_is_read_with_its_usage_and_finish_reason(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion("42"), x_request_id="req-1")
    response = await ask(connect(endpoint.base_url), max_tokens=20, temperature=0.3, seed=5)
    assert response.text == "42"
    assert (response.prompt_tokens, response.completion_tokens) == (11, 3)
    assert (response.finish_reason, response.model, response.response_id) == (
        "stop",
        "m-2",
        "chatcmpl-7",
    )
    assert response.latency_ms is not None
    assert response.metadata == {
        "request_id": "req-1",
        "sampling": {"max_tokens": 20, "temperature": 0.3, "seed": 5},
        "endpoint": endpoint.base_url,
    }
    assert response.prompt_token_ids is response.completion_token_ids is response.logprobs is None


async def test_a_request_carries_what_was_asked_and_nothing_else(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion())
    client = connect(
        endpoint.base_url, sampling={"top_p": 0.9, "stop": None}, extra_body={"priority": 1}
    )
    await ask(client, "hi", tools=[TOOL], max_tokens=9, temperature=0.0, model="m-9", top_p=0.5)
    seen = endpoint.seen[0]
    assert (seen.method, seen.path) == ("POST", "/v1/chat/completions")
    assert seen.headers["authorization"] == "Bearer sk-planted"
    assert seen.headers["accept-encoding"] == "identity"
    assert seen.body == {
        "model": "m-9",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "priority": 1,
    }


async def test_without_a_key_none_is_sent(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion())
    await ask(connect(endpoint.base_url, None))
    assert "authorization" not in endpoint.seen[0].headers


async def test_native_tool_calls_keep_their_arguments_as_text(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": "{oops"}},
        {"type": "function", "function": {"name": "calculator", "arguments": {"a": 1}}},
    ]
    endpoint.answer(completion(None, message={"tool_calls": calls}, finish_reason="tool_calls"))
    response = await ask(connect(endpoint.base_url), tools=[TOOL])
    assert [(call.id, call.arguments) for call in response.tool_calls] == [
        ("c1", "{oops"),
        ("call_1", '{"a":1}'),
    ]
    assert response.text == ""


async def test_tokens_are_asked_for_and_kept_when_capture_is_on(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    logprobs = {"content": [{"token": "4", "logprob": -0.5}, {"token": "2", "logprob": -1.5}]}
    endpoint.answer(
        completion(
            logprobs=logprobs,
            token_ids=[4, 2],
            top={"prompt_token_ids": [1, 2, 3], "metadata": {"weight_version": "12"}},
        )
    )
    response = await ask(connect(endpoint.base_url, capture_tokens=True))
    assert endpoint.seen[0].body["return_token_ids"] is True
    assert endpoint.seen[0].body["logprobs"] is True
    assert response.prompt_token_ids == [1, 2, 3]
    assert response.completion_token_ids == [4, 2]
    assert response.logprobs == [-0.5, -1.5]
    assert response.policy_version == 12


async def test_a_header_can_name_the_policy_version(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion(), x_policy_version="7")
    assert (await ask(connect(endpoint.base_url))).policy_version == 7


@pytest.mark.parametrize(
    ("status", "error", "expected", "code"),
    [
        (400, {"message": "bad temperature"}, ModelBadRequest, "http_400"),
        (401, {"message": "no such key"}, ModelBadRequest, "http_401"),
        (404, {"message": "no such model"}, ModelBadRequest, "http_404"),
        (429, {"code": "insufficient_quota"}, ModelBadRequest, "insufficient_quota"),
        (400, {"code": "context_length_exceeded"}, ContextOverflow, "context_overflow"),
        (
            400,
            {"message": "This model's maximum context length is 4096 tokens."},
            ContextOverflow,
            "context_overflow",
        ),
        (
            400,
            {"message": "The input (9 tokens) is longer than the model's context length (5)."},
            ContextOverflow,
            "context_overflow",
        ),
        (400, {"message": "max_tokens is too large: 9999999"}, ModelBadRequest, "http_400"),
    ],
)
async def test_a_refusal_is_named_and_not_repeated(
    status: int,
    error: dict[str, Any],
    expected: type[ModelError],
    code: str,
    endpoint: Any,
    connect: Any,
    ask: Any,
) -> None:
    endpoint.answer({"error": error}, status)
    with pytest.raises(expected) as caught:
        await ask(connect(endpoint.base_url))
    assert caught.value.code == code
    assert len(endpoint.seen) == 1


async def test_a_redirect_is_refused_and_the_key_goes_nowhere(
    endpoint: Any, connect: Any, ask: Any
) -> None:
    endpoint.answer(b"", 307, location=f"{endpoint.base_url}/elsewhere")
    with pytest.raises(ModelBadRequest, match="Redirects are not followed") as caught:
        await ask(connect(endpoint.base_url))
    assert caught.value.code == "http_307"
    assert len(endpoint.seen) == 1


async def test_a_key_that_the_server_quotes_is_not_in_the_error(
    endpoint: Any, connect: Any, ask: Any
) -> None:
    endpoint.answer({"error": {"message": "Incorrect API key: sk-planted"}}, 401)
    with pytest.raises(ModelBadRequest, match=r"key: \*\*\*") as caught:
        await ask(connect(endpoint.base_url))
    assert "sk-planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<!DOCTYPE html><html>nginx</html>", "web page"),
        (b'{"id": "x", "choices": [{"mess', "does not parse"),
        (b"", "empty body"),
        (b"[1, 2]", "list"),
        (b"[" * 100_000, "does not parse"),
        (b'{"choices": []}', "without choices"),
        (b'{"choices": [{"index": 0}]}', "without a message"),
        (b'{"choices": [{"message": {"content": 5}}]}', "content is a int"),
        (b'{"choices": [{"message": {"tool_calls": [{}]}}]}', "without a function name"),
        (b'{"error": {"message": "unknown thing"}}', "error in its body"),
    ],
)
async def test_an_answer_that_is_no_completion_is_malformed_and_not_repeated(
    body: bytes, says: str, endpoint: Any, connect: Any, ask: Any
) -> None:
    endpoint.answer(body, content_type="text/html" if body[:1] == b"<" else "application/json")
    with pytest.raises(ModelBadRequest, match=says) as caught:
        await ask(connect(endpoint.base_url))
    assert caught.value.code == "malformed_response"
    assert len(endpoint.seen) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"message": "The server is overloaded"}, ModelTransportError),
        ({"message": "upstream said no", "code": 502}, ModelTransportError),
        ({"message": "rate limit reached"}, ModelRateLimit),
        ({"message": "prompt is too long", "code": 400}, ContextOverflow),
    ],
)
async def test_a_200_with_an_error_inside_is_that_error(
    error: dict[str, Any], expected: type[ModelError], endpoint: Any, connect: Any, ask: Any
) -> None:
    endpoint.answer({"error": error})
    with pytest.raises(expected):
        await ask(connect(endpoint.base_url, policy={"max_retries": 0}))


async def test_an_answer_beyond_the_limit_is_refused_by_its_announced_length(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion("x" * 5000))
    with pytest.raises(ModelBadRequest, match="reading stopped") as caught:
        await ask(connect(endpoint.base_url, max_answer_bytes=4096))
    assert caught.value.code == "malformed_response"


async def test_an_answer_beyond_the_limit_is_refused_while_it_streams(
    endpoint: Any, connect: Any, ask: Any
) -> None:
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    endpoint.script.append(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk * 64 + b"0\r\n\r\n"
    )
    with pytest.raises(ModelBadRequest, match="reading stopped"):
        await ask(connect(endpoint.base_url, max_answer_bytes=4096))


async def test_a_compressed_answer_is_refused_before_it_unpacks(
    endpoint: Any, connect: Any, ask: Any
) -> None:
    endpoint.answer(gzip.compress(b" " * 2_000_000), content_encoding="gzip")
    with pytest.raises(ModelBadRequest, match="content-encoding"):
        await ask(connect(endpoint.base_url))


async def test_surrogates_nul_and_control_codes_in_an_answer_survive(
    endpoint: Any, connect: Any, ask: Any
) -> None:
    endpoint.answer(
        b'{"choices": [{"message": {"content": "a\\ud800b\\u0000c\\u001b[31m"},'
        b' "logprobs": {"content": [{"token": "a", "logprob": NaN}]}}]}'
    )
    response = await ask(connect(endpoint.base_url))
    assert response.text == "a\ufffdb\x00c\x1b[31m"
    response.text.encode()


async def test_a_prompt_with_a_lone_surrogate_is_sent(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion())
    await ask(connect(endpoint.base_url), "a\ud800b")
    assert endpoint.seen[0].body["messages"][0]["content"] == "a\ufffdb"


async def test_cancelling_a_call_ends_it_and_the_client_still_works(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion("42"))
    endpoint.hang = asyncio.Event()
    client = connect(endpoint.base_url)
    call = asyncio.create_task(ask(client))
    while not endpoint.seen:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    endpoint.hang.set()
    assert (await ask(client)).text == "42"


async def test_clients_of_one_endpoint_share_connections(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer(completion())
    first, second = connect(endpoint.base_url), connect(endpoint.base_url)
    await ask(first)
    await ask(second)
    assert len(endpoint.tasks) == 1
    await first.aclose()
    await ask(second)
    assert len(endpoint.tasks) == 1


async def test_two_hundred_calls_at_once_are_all_in_flight(
    endpoint: Any, connect: Callable[..., Any], completion: Any, ask: Any
) -> None:
    endpoint.answer(completion("42"))
    endpoint.hang = asyncio.Event()
    client = connect(endpoint.base_url)
    calls = [asyncio.create_task(ask(client)) for _ in range(200)]
    async with asyncio.timeout(10):
        while len(endpoint.seen) < 200:
            await asyncio.sleep(0.01)
    endpoint.hang.set()
    assert {response.text for response in await asyncio.gather(*calls)} == {"42"}


async def test_streaming_and_several_choices_are_refused(connect: Any, ask: Any) -> None:
    for option in ({"stream": True}, {"n": 2}):
        with pytest.raises(ValueError, match="one whole answer"):
            await ask(connect("http://127.0.0.1:9/v1"), **option)


async def test_a_client_is_itself_an_llm_generate_func(
    endpoint: Any, connect: Any, completion: Any
) -> None:
    endpoint.answer(completion("42"))
    async with connect(endpoint.base_url) as client:
        response = await client([{"role": "user", "content": "?"}], max_tokens=5, temperature=0.1)
    assert response.text == "42"
    assert json.loads(json.dumps(response.metadata))


async def test_the_only_model_of_an_endpoint_is_taken_where_none_is_named(
    endpoint: Any, connect: Any, completion: Any, ask: Any
) -> None:
    endpoint.answer({"data": [{"id": "qwen"}]})
    endpoint.answer(completion("42"))
    client = connect(endpoint.base_url, model=None, finds_model=True)
    assert (await ask(client)).text == "42"
    await ask(client)
    assert [seen.path for seen in endpoint.seen] == ["/v1/models"] + ["/v1/chat/completions"] * 2
    assert endpoint.seen[0].headers["authorization"] == "Bearer sk-planted"
    assert endpoint.seen[1].body["model"] == "qwen"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, "It lists 2 models: a, b."),
        ({"data": []}, "OPENAI_MODEL"),
        ({"error": "no"}, "no list of models"),
    ],
)
async def test_a_model_that_cannot_be_found_is_asked_for(
    endpoint: Any, connect: Any, ask: Any, answer: Any, reason: str
) -> None:
    endpoint.answer(answer)
    with pytest.raises(ConfigError, match="No model is named") as error:
        await ask(connect(endpoint.base_url, model=None, finds_model=True))
    assert reason in str(error.value)
    assert "OPENAI_MODEL" in str(error.value)
