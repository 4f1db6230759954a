"""The dialect of OpenAI's text completions: `/v1/completions`.

The prompt goes to the model's server as it is, text or token ids, without a chat template. Pure
functions, used by the server. Must not: send anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta, delta_of
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.chat import finish_reason, openai_error, usage_of
from workers.gateway.rejections import Rejection, bad_request
from workers.gateway.request_fields import ACCOUNT_FIELDS, read_model, require_one_choice
from workers.gateway.server_events import DONE, data_event

_NOT_OPTIONS = ACCOUNT_FIELDS | {"prompt", "model", "n", "best_of", "stream", "stream_options"}


def read_completion_request(body: Mapping[str, Any]) -> CallRequest:
    """Read a request; the record shows its prompt as a message of the user.

    Raises:
        Rejection: It cannot be answered.
    """
    require_one_choice(body)
    prompt = _prompt(body.get("prompt"))
    shown = prompt if isinstance(prompt, str) else f"({len(prompt)} token ids)"
    options = {
        name: value
        for name, value in body.items()
        if name not in _NOT_OPTIONS and value is not None
    }
    return CallRequest(
        read_model(body),
        [{"role": "user", "content": shown}],
        {**options, "prompt": prompt},
        bool(body.get("stream")),
        body,
    )


def write_completion(response: ModelResponse, request: CallRequest) -> dict[str, Any]:
    """Write the body of an answer."""
    head = _head(response.model or request.model)
    choice = _choice(response.text, finish_reason(response))
    return {**head, "choices": [choice], "usage": usage_of(response)}


class CompletionStream:
    """The chunks of one answer."""

    def __init__(self, request: CallRequest) -> None:
        self._head = _head(request.model)
        options = request.body.get("stream_options")
        self._has_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._has_begun = False

    def delta(self, delta: ResponseDelta) -> bytes:
        """Return the chunk of a piece of the response."""
        self._has_begun = True
        return data_event({**self._head, "choices": [_choice(delta.text, None)]})

    def end(self, response: ModelResponse) -> bytes:
        """Return the finish reason, the usage if it was asked for, and the end mark."""
        events = b"" if self._has_begun else self.delta(delta_of(response))
        last = _choice("", finish_reason(response))
        events += data_event({**self._head, "choices": [last]})
        if self._has_usage:
            events += data_event({**self._head, "choices": [], "usage": usage_of(response)})
        return events + DONE

    def error(self, rejection: Rejection) -> bytes:
        """Return an error, which the SDK raises."""
        return data_event(openai_error(rejection))


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
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


COMPLETIONS = Dialect(read_completion_request, write_completion, CompletionStream, openai_error)
