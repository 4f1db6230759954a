"""The dialect of OpenAI's Chat Completions: `/v1/chat/completions`.

Messages and options pass through as they are. Pure functions, used by the server. Must not: send
anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta, delta_of
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.rejections import Rejection
from workers.gateway.request_fields import (
    ACCOUNT_FIELDS,
    read_list,
    read_model,
    require_one_choice,
)
from workers.gateway.server_events import DONE, data_event

_NOT_OPTIONS = ACCOUNT_FIELDS | {"messages", "model", "n", "stream", "stream_options"}
_MAX_TOKENS = "max_completion_tokens"  # newer name of `max_tokens`


def read_chat(body: Mapping[str, Any]) -> CallRequest:
    """Read a request.

    Raises:
        Rejection: It cannot be answered.
    """
    require_one_choice(body)
    messages = read_list(body, "messages", is_required=True)
    read_list(body, "tools")
    options = {
        name: value
        for name, value in body.items()
        if name not in _NOT_OPTIONS and value is not None
    }
    if _MAX_TOKENS in options:
        options["max_tokens"] = options.pop(_MAX_TOKENS)
    return CallRequest(read_model(body), messages, options, bool(body.get("stream")), body)


def write_chat(response: ModelResponse, request: CallRequest) -> dict[str, Any]:
    """Write the body of an answer."""
    choice = {
        "index": 0,
        "message": chat_message(response),
        "logprobs": None,
        "finish_reason": finish_reason(response),
    }
    return {
        **_head(response.response_id, "chat.completion", response.model or request.model),
        "choices": [choice],
        "usage": usage_of(response),
    }


def chat_message(response: ModelResponse) -> dict[str, Any]:
    """Return the assistant's message, with its reasoning in the field that the server used."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": response.text or (None if response.tool_calls else ""),
        **response.metadata.get("reasoning_fields", {}),
    }
    if refusal := response.metadata.get("refusal"):
        message["refusal"] = refusal
    if response.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in response.tool_calls
        ]
    return message


def finish_reason(response: ModelResponse) -> str:
    """Return why the response ended; servers that say nothing have ended it."""
    return response.finish_reason or ("tool_calls" if response.tool_calls else "stop")


def usage_of(response: ModelResponse) -> dict[str, int]:
    """Return the tokens that the call used; 0 where the server does not count."""
    prompt, completion = response.prompt_tokens or 0, response.completion_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def openai_error(rejection: Rejection) -> dict[str, Any]:
    """Write the body of an error."""
    return {
        "error": {
            "message": rejection.message,
            "type": _error_type(rejection.status),
            "param": None,
            "code": rejection.code,
        }
    }


class ChatStream:
    """The chunks of one answer."""

    def __init__(self, request: CallRequest) -> None:
        self._model = request.model
        self._id = _new_id()
        options = request.body.get("stream_options")
        self._has_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._has_begun = False

    def delta(self, delta: ResponseDelta) -> bytes:
        """Return the chunk of a piece of the response."""
        change: dict[str, Any] = {}
        if delta.reasoning:
            change[delta.reasoning_field] = delta.reasoning
        if delta.text:
            change["content"] = delta.text
        if delta.tool_calls:
            change["tool_calls"] = [
                {
                    "index": call.index,
                    **({"id": call.id, "type": "function"} if call.id else {}),
                    "function": {
                        **({"name": call.name} if call.name else {}),
                        "arguments": call.arguments,
                    },
                }
                for call in delta.tool_calls
            ]
        return self._chunk(change)

    def end(self, response: ModelResponse) -> bytes:
        """Return the finish reason, the usage if it was asked for, and the end mark."""
        events = b"" if self._has_begun else self.delta(delta_of(response))
        events += self._chunk({}, finish_reason(response))
        if self._has_usage:
            events += data_event({**self._head(), "choices": [], "usage": usage_of(response)})
        return events + DONE

    def error(self, rejection: Rejection) -> bytes:
        """Return an error, which the SDK raises."""
        return data_event(openai_error(rejection))

    def _chunk(self, change: dict[str, Any], finish_reason: str | None = None) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            change = {"role": "assistant", "content": "", **change}
        choice = {"index": 0, "delta": change, "logprobs": None, "finish_reason": finish_reason}
        return data_event({**self._head(), "choices": [choice]})

    def _head(self) -> dict[str, Any]:
        return _head(self._id, "chat.completion.chunk", self._model)


def _head(response_id: str | None, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": response_id or _new_id(),
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


CHAT = Dialect(read_chat, write_chat, ChatStream, openai_error)
