"""The events of a streamed answer in OpenAI's Responses API.

Used by the dialect in `responses.py`. Must not: read requests.
"""

from __future__ import annotations

from typing import Any

from workers.core.model_response import ModelResponse
from workers.core.response_delta import ResponseDelta, ToolCallDelta, delta_of
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.chat import openai_error
from workers.gateway.reasoning_fields import mark_of
from workers.gateway.rejections import Rejection, interleaved_calls
from workers.gateway.responses import (
    call_item,
    message_item,
    new_id,
    read_response_request,
    reasoning_item,
    response_body,
    text_part,
    write_response,
)
from workers.gateway.server_events import named_event


class ResponseStream:
    """One answer: items of reasoning, text and tool calls, one after the other."""

    def __init__(self, request: CallRequest) -> None:
        self._request = request
        self._id = new_id("resp")
        self._sequence = -1
        self._items: list[dict[str, Any]] = []
        self._item: _OpenItem | None = None

    def delta(self, delta: ResponseDelta) -> bytes:
        """Return the events of a piece of the response."""
        events = b"" if self._sequence >= 0 else self._start()
        if delta.reasoning:
            events += self._in_item("reasoning", mark_of(delta.reasoning_field))
            events += self._grow(delta.reasoning)
        if delta.text:
            events += self._in_item("message")
            events += self._grow(delta.text)
        for call in delta.tool_calls:
            if not call.id and not self._is_in(call):
                raise interleaved_calls()
            events += self._in_item("function_call", call)
            if call.arguments:
                events += self._grow(call.arguments)
        return events

    def end(self, response: ModelResponse) -> bytes:
        """Return the end of the last item, and the whole response."""
        events = b"" if self._sequence >= 0 else self.delta(delta_of(response))
        if not self._items and self._item is None:
            events += self._in_item("message")
        events += self._close_item()
        body = response_body(self._request, self._id, response, self._items)
        return events + self._event(f"response.{body['status']}", response=body)

    def error(self, rejection: Rejection) -> bytes:
        """Return an error, which the SDK raises."""
        error = openai_error(rejection)["error"]
        return self._event("error", **error, error=error)

    def _is_in(self, call: ToolCallDelta) -> bool:
        return self._item is not None and self._item.key == ("function_call", call.index)

    def _start(self) -> bytes:
        body = response_body(self._request, self._id, None, [])
        events = self._event("response.created", response=body)
        return events + self._event("response.in_progress", response=body)

    def _in_item(self, kind: str, detail: str | ToolCallDelta = "") -> bytes:
        """Begin an item unless it is the current one."""
        key = (kind, detail.index if isinstance(detail, ToolCallDelta) else 0)
        if self._item is not None and self._item.key == key:
            return b""
        events = self._close_item()
        item = self._item = _OpenItem(key, detail)
        events += self._event(
            "response.output_item.added", output_index=len(self._items), item=item.written(None)
        )
        if kind == "message":
            events += self._of_item("response.content_part.added", part=text_part(""))
        return events

    def _grow(self, text: str) -> bytes:
        assert self._item is not None
        self._item.text += text
        return self._of_item(f"{self._item.event}.delta", delta=text)

    def _close_item(self) -> bytes:
        item = self._item
        if item is None:
            return b""
        written = item.written(item.text)
        content = {item.field: item.text}
        events = self._of_item(f"{item.event}.done", **content)
        if item.kind == "message":
            events += self._of_item("response.content_part.done", part=text_part(item.text))
        events += self._event(
            "response.output_item.done", output_index=len(self._items), item=written
        )
        self._items.append(written)
        self._item = None
        return events

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        place = {"item_id": self._item.id, "output_index": len(self._items)}
        return self._event(kind, **place, **self._item.extra, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return named_event({"type": kind, "sequence_number": self._sequence, **fields})


class _OpenItem:
    """The item that is being written."""

    def __init__(self, key: tuple[str, int], detail: str | ToolCallDelta) -> None:
        self.key = key
        self.kind = key[0]
        self.text = ""
        self._detail = detail
        self.id = new_id({"reasoning": "rs", "message": "msg"}.get(self.kind, "fc"))
        self.field = "arguments" if self.kind == "function_call" else "text"
        names = {"reasoning": "reasoning_text", "message": "output_text"}
        self.event = f"response.{names.get(self.kind, 'function_call_arguments')}"
        self.extra: dict[str, Any] = {} if self.kind == "function_call" else {"content_index": 0}
        if self.kind == "message":
            self.extra["logprobs"] = []

    def written(self, text: str | None) -> dict[str, Any]:
        """Return the item; a text of None marks an item that has only begun."""
        if isinstance(self._detail, ToolCallDelta):
            return call_item(self.id, self._detail.id, self._detail.name, text)
        if self.kind == "reasoning":
            return reasoning_item(self.id, text, self._detail)
        return message_item(self.id, text)


RESPONSES = Dialect(read_response_request, write_response, ResponseStream, openai_error)
