"""The dialect of OpenAI's Chat Completions: `/v1/chat/completions`.

Messages and options pass through as they are. Pure functions, used by the server. Must not: send
anything.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta, delta_of
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.rejections import Rejection
from workers.gateway.request_fields import (
    read_list,
    read_model,
    read_options,
    require_one_choice,
)
from workers.gateway.server_events import DONE, data_event

_OWN_FIELDS = frozenset({"messages", "model", "n", "stream", "stream_options"})
_MAX_TOKENS = "max_completion_tokens"  # newer name of `max_tokens`


def read_chat(body: Mapping[str, Any]) -> CallRequest:
    """Read a request.

    Raises:
        Rejection: It cannot be answered.
    """
    require_one_choice(body)
    messages = read_list(body, "messages", is_required=True)
    read_list(body, "tools")
    options = read_options(body, _OWN_FIELDS)
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
        **head_of("chat.completion", response.model or request.model, response.response_id),
        "choices": [choice],
        "usage": usage_of(response),
    }


def chat_message(response: ModelResponse) -> dict[str, Any]:
    """Return the assistant's message, with its reasoning in the field that the server used."""
    message = response.to_message() | response.metadata.get("reasoning_fields", {})
    if response.tool_calls and not response.text:
        message["content"] = None
    if refusal := response.metadata.get("refusal"):
        message["refusal"] = refusal
    return message


def finish_reason(response: ModelResponse) -> str:
    """Return the finish reason; `tool_calls` or `stop` where the server gives none."""
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


class ChunkStream(ABC):
    """The chunks of one answer in the APIs of OpenAI whose answers have choices.

    Args:
        request: The request.
        head: The fields of each chunk besides its choices.
    """

    def __init__(self, request: CallRequest, head: Mapping[str, Any]) -> None:
        self._head = head
        options = request.body.get("stream_options")
        self._has_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._has_begun = False

    def delta(self, delta: ResponseDelta) -> bytes:
        """Return the chunk of a piece of the response."""
        return self._chunk(delta, None)

    def end(self, response: ModelResponse) -> bytes:
        """Return the finish reason, the usage if the request wants it, and the end mark."""
        events = b"" if self._has_begun else self.delta(delta_of(response))
        events += self._chunk(ResponseDelta(), finish_reason(response))
        if self._has_usage:
            events += data_event({**self._head, "choices": [], "usage": usage_of(response)})
        return events + DONE

    def error(self, rejection: Rejection) -> bytes:
        """Return an error, which the SDK raises."""
        return data_event(openai_error(rejection))

    def _chunk(self, delta: ResponseDelta, finish_reason: str | None) -> bytes:
        choice = self._choice(delta, finish_reason)
        self._has_begun = True
        return data_event({**self._head, "choices": [choice]})

    @abstractmethod
    def _choice(self, delta: ResponseDelta, finish_reason: str | None) -> dict[str, Any]:
        """Return the choice of a chunk."""


class ChatStream(ChunkStream):
    """The chunks of one chat completion."""

    def __init__(self, request: CallRequest) -> None:
        super().__init__(request, head_of("chat.completion.chunk", request.model))

    def _choice(self, delta: ResponseDelta, finish_reason: str | None) -> dict[str, Any]:
        change: dict[str, Any] = {} if self._has_begun else {"role": "assistant", "content": ""}
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
        return {"index": 0, "delta": change, "logprobs": None, "finish_reason": finish_reason}


def head_of(kind: str, model: str, response_id: str | None = None) -> dict[str, Any]:
    """Return the first fields of an answer or chunk; without an id a new one is made."""
    return {
        "id": response_id or f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


CHAT = Dialect(read_chat, write_chat, ChatStream, openai_error)
