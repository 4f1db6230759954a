from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fixtures.offline_policy import serving

from pipeline.contract.errors import InputError, ModelBadRequest
from workers.llm.call_retries import CallRetryPolicy
from workers.llm.connections import close_connections
from workers.llm.lean_client import LeanClient
from workers.offline_policy.draws import Mishap, expected_is_wrong, mishap_of_sample
from workers.offline_policy.policy import OfflinePolicyOptions

FAST = CallRetryPolicy(max_retries=3, base_s=0.001)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key.jsonl"
    rows = [{"q": f"Riddle {n}?", "a": f"work\n#### {n}"} for n in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_the_mean_reward_is_known_beforehand_whatever_order_and_failures(
    key_file: Path,
) -> None:
    options = OfflinePolicyOptions(
        answer_key=key_file,
        prompt_field="q",
        answer_field="a",
        wrong=0.2,
        errors=0.3,
        retry_after_ms=1,
        seed=11,
    )
    async with serving(options) as (base_url, policy):
        client = LeanClient(base_url, model="m", retries=FAST)

        async def is_right(n: int, index: int) -> bool:
            messages = [{"role": "user", "content": f"Riddle {n}?"}]
            response = await client.generate(messages, seed=index)
            return response.text.endswith(f"#### {n}")

        asked = [(n, index) for index in range(4) for n in reversed(range(50))]
        right = await asyncio.gather(*(is_right(*pair) for pair in asked))
        await close_connections()
    expected = [not expected_is_wrong(11, f"Riddle {n}?", index, 0.2) for n, index in asked]
    assert right == expected
    assert policy.counts["answers"] == 200
    assert policy.counts["rate_limit"] > 10
    assert policy.counts["server_error"] > 10
    assert policy.counts["calls"] == 200 + sum(
        policy.counts[kind] for kind in ("rate_limit", "server_error")
    )


async def test_mishaps_strike_who_they_should_and_refusals_are_final() -> None:
    options = OfflinePolicyOptions(mishaps=0.5, seed=0, stall_s=0.01, retry_after_ms=1)
    met: Counter[Mishap | None] = Counter()
    async with serving(options) as (base_url, _):
        client = LeanClient(base_url, model="m", retries=FAST)
        for index in range(60):
            mishap = mishap_of_sample(0, "What is 2 + 3?", index, 0.5)
            met[mishap] += 1
            messages = [{"role": "user", "content": "What is 2 + 3?"}]
            call = client.generate(messages, seed=index)
            if mishap is Mishap.BAD_REQUEST:
                with pytest.raises(ModelBadRequest, match="Injected refusal"):
                    await call
                continue
            response = await call
            retried = mishap in (Mishap.RATE_LIMIT, Mishap.SERVER_ERROR)
            assert response.metadata.get("retries", 0) == int(retried)
        await close_connections()
    assert set(met) == {None, *Mishap}


async def test_the_openai_sdk_understands_whole_answers_streams_and_the_list() -> None:
    import openai

    tool = {
        "type": "function",
        "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}},
    }
    question: list[Any] = [{"role": "user", "content": "What is 12 * (3 + 4)?"}]
    async with (
        serving() as (base_url, _),
        openai.AsyncOpenAI(base_url=base_url, api_key="none") as sdk,
    ):
        whole = await sdk.chat.completions.create(model="m", messages=question)
        stream = await sdk.chat.completions.create(
            model="m",
            messages=question,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        tools: Any = [tool]
        calls = await sdk.chat.completions.create(
            model="m", messages=question, tools=tools, stream=True
        )
        call_chunks = [chunk async for chunk in calls]
        names = [card.id async for card in sdk.models.list()]
    text = whole.choices[0].message.content
    assert text == "12 * (3 + 4) = 84"
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == text
    assert chunks[-1].usage == whole.usage
    deltas = [c.choices[0].delta.tool_calls for c in call_chunks if c.choices[0].delta.tool_calls]
    call = (deltas[0] or [])[0]
    assert call.function is not None
    assert json.loads(call.function.arguments or "") == {"expression": "12 * (3 + 4)"}
    assert call_chunks[-1].choices[0].finish_reason == "tool_calls"
    assert names == ["offline-policy"]


async def test_token_ids_and_logprobs_are_given_when_asked_for() -> None:
    async with serving(OfflinePolicyOptions(policy_version=4)) as (base_url, _):
        client = LeanClient(base_url, model="m", capture_tokens=True)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 3?"}]
        first = await client.generate(messages)
        messages += [first.to_message(), {"role": "user", "content": "Sure?"}]
        second = await client.generate(messages)
        await close_connections()
    assert first.policy_version == 4
    assert first.prompt_token_ids is not None
    assert first.completion_token_ids is not None
    assert first.logprobs is not None
    assert second.prompt_token_ids is not None
    assert len(first.logprobs) == len(first.completion_token_ids) == first.completion_tokens
    assert len(first.prompt_token_ids) == first.prompt_tokens
    assert all(-2 <= logprob <= 0 for logprob in first.logprobs)
    before = [*first.prompt_token_ids, *first.completion_token_ids]
    assert second.prompt_token_ids[: len(before)] == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": ["hi"]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "n": 3}',
    ],
)
async def test_what_is_no_chat_request_is_refused(body: bytes) -> None:
    async with serving() as (base_url, _), aiohttp.ClientSession() as http:
        async with http.post(f"{base_url}/chat/completions", data=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "invalid_request"
        async with http.get(f"{base_url}/chat/completions") as answer:
            assert answer.status == 404
        async with http.get(base_url.removesuffix("/v1") + "/health") as answer:
            assert (await answer.json()) == {"status": "ok", "stand_in": "offline-policy"}


async def test_the_server_counts_what_it_did() -> None:
    options = OfflinePolicyOptions(errors=1.0, retry_after_ms=1)
    async with serving(options) as (base_url, _), aiohttp.ClientSession() as http:
        client = LeanClient(base_url, model="m", retries=FAST)
        await client.generate([{"role": "user", "content": "What is 2 + 3?"}], seed=[1])
        await client.aclose()
        async with http.get(base_url.removesuffix("/v1") + "/stats") as answer:
            counts = await answer.json()
    assert counts["calls"] == 4
    assert counts["answers"] == 1
    assert counts.get("rate_limit", 0) + counts.get("server_error", 0) == 3


SERVER = """
import sys
from workers.offline_policy.policy import OfflinePolicyOptions
from workers.offline_policy.server import run_server
fd = int(sys.argv[1])
run_server(OfflinePolicyOptions(fd=None if fd < 0 else fd))
"""


@pytest.mark.parametrize("is_inherited", [False, True])
async def test_a_server_process_says_when_it_is_ready_and_ends_on_sigterm(
    is_inherited: bool,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0)) if is_inherited else None
    fd = listener.fileno() if listener else -1
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(fd)],
        stdout=subprocess.PIPE,
        pass_fds=[fd] if listener else [],
    )
    with process:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        ready = json.loads(line)
        assert ready["ready"] is True
        assert ready["pid"] == process.pid
        client = LeanClient(ready["base_url"], model="m")
        answer = await client.generate([{"role": "user", "content": "What is 2 + 3?"}])
        await client.aclose()
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.to_thread(process.wait), 10)
    if listener:
        assert ready["port"] == listener.getsockname()[1]
        listener.close()
    assert answer.text == "2 + 3 = 5"
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{oops", r"key\.jsonl:1 is not JSON"), ('{"q": "x"}', "has no field 'a'"), ("5", "no JSON")],
)
def test_a_bad_answer_key_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    from workers.offline_policy.policy import OfflinePolicy

    path = tmp_path / "key.jsonl"
    options = OfflinePolicyOptions(answer_key=path, prompt_field="q", answer_field="a")
    with pytest.raises(InputError, match="cannot be read"):
        OfflinePolicy.from_options(options)
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        OfflinePolicy.from_options(options)


def test_a_rate_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="wrong must be between 0 and 1"):
        OfflinePolicyOptions(wrong=20)
