"""The events of a streamed answer in Anthropic's Messages API.

Used by the dialect in `messages.py`. Must not: read requests.
"""

from __future__ import annotations

from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta, ToolCallDelta, delta_of
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.messages import (
    anthropic_error,
    message_usage,
    new_message_id,
    read_messages,
    stop_reason,
    write_message,
)
from workers.gateway.reasoning_fields import mark_of
from workers.gateway.rejections import Rejection, interleaved_calls
from workers.gateway.server_events import named_event


class MessageStream:
    """One answer: blocks of thinking, text and tool calls, one after the other."""

    def __init__(self, request: CallRequest) -> None:
        self._model = request.model
        self._has_begun = False
        self._block: tuple[str, int] | None = None  # the kind, and the index of a tool call
        self._index = -1
        self._reasoning_field = ""

    def delta(self, delta: ResponseDelta) -> bytes:
        """Return the events of a piece of the response."""
        events = b"" if self._has_begun else self._start()
        if delta.reasoning:
            self._reasoning_field = delta.reasoning_field
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._in_block(("thinking", 0), empty)
            events += self._change({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            events += self._in_block(("text", 0), {"type": "text", "text": ""})
            events += self._change({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            events += self._tool_call(call)
        return events

    def end(self, response: ModelResponse) -> bytes:
        """Return the end of the last block, the stop reason and the usage."""
        events = b"" if self._has_begun else self.delta(delta_of(response))
        events += self._stop_block()
        change = {"stop_reason": stop_reason(response), "stop_sequence": None}
        usage = message_usage(response)
        events += named_event({"type": "message_delta", "delta": change, "usage": usage})
        return events + named_event({"type": "message_stop"})

    def error(self, rejection: Rejection) -> bytes:
        """Return an error, which the SDK raises."""
        return named_event(anthropic_error(rejection))

    def _start(self) -> bytes:
        self._has_begun = True
        message = {
            "id": new_message_id(),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return named_event({"type": "message_start", "message": message})

    def _tool_call(self, call: ToolCallDelta) -> bytes:
        if not call.id and self._block != ("tool_use", call.index):
            raise interleaved_calls()
        empty = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        events = self._in_block(("tool_use", call.index), empty)
        if call.arguments:
            events += self._change({"type": "input_json_delta", "partial_json": call.arguments})
        return events

    def _in_block(self, block: tuple[str, int], empty: dict[str, Any]) -> bytes:
        """Begin a block unless it is the current one."""
        if block == self._block:
            return b""
        events = self._stop_block()
        self._block = block
        self._index += 1
        return events + named_event(
            {"type": "content_block_start", "index": self._index, "content_block": empty}
        )

    def _change(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop_block(self) -> bytes:
        if self._block is None:
            return b""
        events = b""
        if self._block[0] == "thinking":
            mark = mark_of(self._reasoning_field)
            events += self._change({"type": "signature_delta", "signature": mark})
        self._block = None
        return events + named_event({"type": "content_block_stop", "index": self._index})


MESSAGES = Dialect(read_messages, write_message, MessageStream, anthropic_error)
