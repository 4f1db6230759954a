"""The offline policy: an OpenAI-compatible stand-in server that answers like a model from rules.

`rollout offline-policy`, the demo and the tests run it. This module handles HTTP: requests,
completions, streams and injected failures. The answers come from `rules`. The application is plain
ASGI, because a framework would cost more CPU than the answer. Must not: be called a model anywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.llm.json_text import JsonError, parse_json
from workers.offline_policy.answer_key import AnswerKey, load_answer_key
from workers.offline_policy.asgi_answers import (
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
    send_stream,
)
from workers.offline_policy.completion import POLICY_NAME, completion, policy_card, stream_chunks
from workers.offline_policy.draws import (
    Mishap,
    expected_is_wrong,
    failure_of_call,
    mishap_of_sample,
)
from workers.offline_policy.rules import Reply, Task, read_task, reply_to

#: The mishaps that make the first call of a sample fail; the others change the answer.
_MISHAPS_OF_A_CALL = frozenset({Mishap.RATE_LIMIT, Mishap.SERVER_ERROR, Mishap.STALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePolicyOptions:
    """The options of the offline policy; every rate is between 0 and 1."""

    host: str = "127.0.0.1"
    port: int = 0  #: 0 takes a free one
    fd: int | None = None  #: an inherited listening socket instead of host and port
    answer_key: Path | None = None  #: JSONL with questions and gold answers
    prompt_field: str = "question"
    answer_field: str = "answer"
    wrong: float = 0.0  #: share of samples answered wrongly
    errors: float = 0.0  #: share of calls that fail once with 429 or 500
    mishaps: float = 0.0  #: share of samples with a `Mishap`
    latency_ms: float = 0.0
    stall_s: float = 3.0  #: delay of a stalled answer
    retry_after_ms: int = 100  #: Retry-After of an injected 429
    seed: int = 0
    policy_version: int | None = None  #: reported as the version of the weights

    def __post_init__(self) -> None:
        for name in ("wrong", "errors", "mishaps"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")


@dataclass(slots=True)
class _Call:
    request: Mapping[str, Any]
    task: Task
    sample_key: object
    mishap: Mishap | None


@dataclass(slots=True)
class OfflinePolicy:
    """The ASGI application; `counts` has the numbers of its answers and failures.

    The only state that influences a decision is the number of failures of a call, so that injected
    failures end. Requests without a sample key are numbered in order of arrival.
    """

    options: OfflinePolicyOptions
    key: AnswerKey | None = None
    counts: Counter[str] = field(default_factory=Counter)
    _failures: Counter[tuple[str, object, int]] = field(default_factory=Counter)
    _arrivals: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_options(cls, options: OfflinePolicyOptions) -> OfflinePolicy:
        """Load the answer key, if any, and make the application.

        Raises:
            InputError: The answer key cannot be read.
        """
        if options.answer_key is None:
            return cls(options)
        key = load_answer_key(
            options.answer_key,
            prompt_field=options.prompt_field,
            answer_field=options.answer_field,
        )
        return cls(options, key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path == "/v1/chat/completions" and method == "POST":
            await self._chat(await read_body(receive), send)
        elif path == "/v1/models" and method == "GET":
            await send_json(send, 200, {"object": "list", "data": [policy_card()]})
        elif path == "/version" and method == "GET":
            # vLLM has this path; clients that find it ask for token ids.
            await send_json(send, 200, {"version": POLICY_NAME})
        elif path == "/health" and method == "GET":
            await send_json(send, 200, {"status": "ok", "stand_in": POLICY_NAME})
        elif path == "/stats" and method == "GET":
            await send_json(send, 200, dict(self.counts))
        else:
            await send_error(send, 404, f"No {method} {path} here.", "not_found")

    async def _chat(self, raw: bytes, send: Send) -> None:
        self.counts["calls"] += 1
        try:
            call = self._read(raw)
        except (JsonError, TypeError, ValueError) as error:
            await send_error(send, 400, f"Not a chat request: {error}", "invalid_request")
            return
        if self.options.latency_ms:
            await asyncio.sleep(self.options.latency_ms / 1000)
        if await self._fails(call, send):
            return
        reply = self._reply(call)
        whole = completion(
            call.request,
            reply,
            prompt_text=call.task.prompt_text,
            seed=self.options.seed,
            policy_version=self.options.policy_version,
        )
        if call.request.get("stream"):
            include_usage = bool((call.request.get("stream_options") or {}).get("include_usage"))
            await send_stream(send, stream_chunks(whole, include_usage=include_usage))
        else:
            await send_json(send, 200, whole, self._version_headers())

    def _read(self, raw: bytes) -> _Call:
        request = parse_json(raw)
        messages = request.get("messages") if isinstance(request, dict) else None
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list with at least one message")
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("every message must be an object")
        if (request.get("n") or 1) != 1:
            raise ValueError("n must be 1")
        tools = request.get("tools") if request.get("tool_choice") != "none" else None
        task = read_task(messages, tools, self.key)
        sample_key = self._sample_key(request, task)
        mishap = mishap_of_sample(
            self.options.seed, task.prompt_text, sample_key, self.options.mishaps
        )
        return _Call(request, task, sample_key, mishap)

    def _sample_key(self, request: Mapping[str, Any], task: Task) -> str | int:
        for name in ("seed", "user"):
            if request.get(name) is not None:
                return str(request[name])
        if task.turn == 0:
            self._arrivals[task.prompt_text] += 1
        return self._arrivals[task.prompt_text] - 1

    async def _fails(self, call: _Call, send: Send) -> bool:
        failure = self._failure(call)
        if failure is None:
            return False
        self.counts[failure.value] += 1
        if failure is Mishap.RATE_LIMIT:
            wait_ms = self.options.retry_after_ms
            headers = [
                (b"retry-after", str(-(-wait_ms // 1000)).encode()),
                (b"retry-after-ms", str(wait_ms).encode()),
            ]
            await send_error(send, 429, "Injected rate limit.", "rate_limit_exceeded", headers)
        elif failure is Mishap.SERVER_ERROR:
            await send_error(send, 500, "Injected server error.", "server_error")
        elif failure is Mishap.BAD_REQUEST:
            await send_error(send, 400, "Injected refusal of this prompt.", "invalid_prompt")
        else:
            await asyncio.sleep(self.options.stall_s)
            return False
        return True

    def _failure(self, call: _Call) -> Mishap | None:
        if call.mishap is Mishap.BAD_REQUEST:
            return Mishap.BAD_REQUEST
        call_key = (call.task.prompt_text, call.sample_key, len(call.request["messages"]))
        nth = self._failures[call_key]
        failure = call.mishap if nth == 0 and call.task.turn == 0 else None
        if failure not in _MISHAPS_OF_A_CALL:
            failure = failure_of_call(self.options.seed, call_key, nth, self.options.errors)
        if failure is None:
            # A successful call is removed, so that only failing calls take memory.
            del self._failures[call_key]
        else:
            self._failures[call_key] += 1
        return failure

    def _reply(self, call: _Call) -> Reply:
        is_wrong = expected_is_wrong(
            self.options.seed, call.task.prompt_text, call.sample_key, self.options.wrong
        )
        self.counts["answers"] += 1
        return reply_to(
            call.task,
            seed=self.options.seed,
            sample_key=call.sample_key,
            is_wrong=is_wrong,
            mishap=call.mishap,
        )

    def _version_headers(self) -> list[tuple[bytes, bytes]]:
        version = self.options.policy_version
        return [] if version is None else [(b"x-policy-version", str(version).encode())]
