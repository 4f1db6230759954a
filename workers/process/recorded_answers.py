"""The answers of model calls as a journal holds them, and back.

`journal.py` writes them; `ModelCalls` reads them. Must not: find the answer to a request.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

from pipeline.contract.journal import RecordedCall
from workers.core.model_response import ModelResponse, NativeToolCall

_RESPONSE_FIELDS = (
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "model",
    "response_id",
    "policy_version",
    "latency_ms",
    "metadata",
)


def values_of(response: ModelResponse) -> dict[str, Any]:
    """Return the fields of an answer that are recorded, without its tokens."""
    values = {name: getattr(response, name) for name in _RESPONSE_FIELDS}
    calls = [(call.id, call.name, call.arguments) for call in response.tool_calls]
    return {name: value for name, value in values.items() if value not in (None, {})} | (
        {"tool_calls": calls} if calls else {}
    )


def response_of(call: RecordedCall) -> ModelResponse:
    """Return the answer of a recorded model call, as the client gave it."""
    values = dict(call.result)
    tool_calls = tuple(NativeToolCall(*each) for each in values.pop("tool_calls", ()))
    tokens = call.tokens
    ids: dict[str, Any] = {}
    if tokens is not None:
        ids = {
            "prompt_token_ids": _unpacked("i", tokens.new_prompt),
            "completion_token_ids": _unpacked("i", tokens.completion),
            "logprobs": None if tokens.logprobs is None else _unpacked("f", tokens.logprobs),
        }
    return ModelResponse(**values, tool_calls=tool_calls, **ids)


def _unpacked(kind: str, data: bytes) -> list[Any]:
    items = array(kind, data)
    if sys.byteorder == "big":
        items.byteswap()
    return items.tolist()
