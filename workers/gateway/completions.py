"""The dialect of OpenAI's text completions: `/v1/completions`.

The prompt goes to the model's server as it is, text or token ids, without a chat template. Pure
functions, used by the server. Must not: send anything.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.chat import ChunkStream, finish_reason, head_of, openai_error, usage_of
from workers.gateway.rejections import bad_request
from workers.gateway.request_fields import read_model, read_options, require_one_choice

_OWN_FIELDS = frozenset({"prompt", "model", "n", "best_of", "stream", "stream_options"})


def read_completion_request(body: Mapping[str, Any]) -> CallRequest:
    """Read a request; the record shows its prompt as a message of the user.

    Raises:
        Rejection: It cannot be answered.
    """
    require_one_choice(body)
    prompt = _prompt(body.get("prompt"))
    shown = prompt if isinstance(prompt, str) else f"({len(prompt)} token ids)"
    return CallRequest(
        read_model(body),
        [{"role": "user", "content": shown}],
        {**read_options(body, _OWN_FIELDS), "prompt": prompt},
        bool(body.get("stream")),
        body,
    )


def write_completion(response: ModelResponse, request: CallRequest) -> dict[str, Any]:
    """Write the body of an answer."""
    head = _head(response.model or request.model)
    choice = _choice(response.text, finish_reason(response))
    return {**head, "choices": [choice], "usage": usage_of(response)}


class CompletionStream(ChunkStream):
    """The chunks of one text completion."""

    def __init__(self, request: CallRequest) -> None:
        super().__init__(request, _head(request.model))

    def _choice(self, delta: ResponseDelta, finish_reason: str | None) -> dict[str, Any]:
        return _choice(delta.text, finish_reason)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    is_ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    if isinstance(value, str) or is_ids:
        return value
    raise bad_request("The field `prompt` must be one text, or one list of token ids.")


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _head(model: str) -> dict[str, Any]:
    return head_of("text_completion", model, f"cmpl-{uuid.uuid4().hex}")


COMPLETIONS = Dialect(read_completion_request, write_completion, CompletionStream, openai_error)
