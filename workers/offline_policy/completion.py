"""The offline policy's answers in the OpenAI format: whole, or as the chunks of a stream.

Must not: decide the content of an answer, or send it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from workers.offline_policy.rules import Reply
from workers.offline_policy.tokens import (
    completion_logprobs,
    completion_token_ids,
    prompt_token_ids,
    token_text,
)

POLICY_NAME = "offline-policy"
_STREAM_PIECE_CHARS = 24
_serial = itertools.count()


def policy_card() -> dict[str, Any]:
    """Return the only entry of the list of models; its text says that it is not a model."""
    return {"id": POLICY_NAME, "object": "model", "created": 0, "owned_by": "stand-in"}


def completion(
    request: Mapping[str, Any],
    reply: Reply,
    *,
    prompt_text: str,
    seed: int,
    policy_version: int | None,
) -> dict[str, Any]:
    """Write a chat completion, with logprobs and token ids where the request asks for them."""
    prompt_ids = prompt_token_ids(request["messages"], request.get("tools"))
    ids = completion_token_ids(reply)
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(reply),
        "finish_reason": "tool_calls" if reply.tool_name else "stop",
        "logprobs": None,
    }
    if request.get("logprobs"):
        choice["logprobs"] = _logprobs(
            ids, completion_logprobs(ids, seed=seed, prompt_text=prompt_text)
        )
    body: dict[str, Any] = {
        "id": f"chatcmpl-{next(_serial)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": POLICY_NAME,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt_ids) + len(ids),
        },
    }
    if policy_version is not None:
        body["metadata"] = {"weight_version": str(policy_version)}
    if request.get("return_token_ids"):
        body["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = ids
    return body


def stream_chunks(whole: dict[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """Cut a completion into the chunks of a stream; the first one has the prompt token ids."""
    last = dict(whole["choices"][0])
    message = last.pop("message")
    envelope = {name: whole[name] for name in whole if name not in ("choices", "usage")}
    envelope["object"] = "chat.completion.chunk"
    prompt_ids = envelope.pop("prompt_token_ids", None)
    chunks: list[dict[str, Any]] = [
        {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in _deltas(message)
    ]
    if prompt_ids is not None:
        chunks[0]["prompt_token_ids"] = prompt_ids
    chunks.append({**envelope, "choices": [{**last, "delta": {}}]})
    if include_usage:
        chunks.append({**envelope, "choices": [], "usage": whole["usage"]})
    return chunks


def _message(reply: Reply) -> dict[str, Any]:
    if not reply.tool_name:
        return {"role": "assistant", "content": reply.text}
    call = {
        "id": f"call_{next(_serial)}",
        "type": "function",
        "function": {"name": reply.tool_name, "arguments": reply.tool_arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _logprobs(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": token_text(token), "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
    }


def _deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    text = message["content"] or ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [
        {"content": text[start : start + _STREAM_PIECE_CHARS]}
        for start in range(0, len(text), _STREAM_PIECE_CHARS)
    ]
    if "tool_calls" in message:
        deltas.append({"tool_calls": [{"index": 0, **message["tool_calls"][0]}]})
    return deltas
