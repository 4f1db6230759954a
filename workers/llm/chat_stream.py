"""Reads a streamed chat completion: passes each piece on, and builds the whole completion.

`LeanClient` feeds it the bytes of server-sent events. The completion is the body that the server
would have sent at once, with token ids and logprobs, so that `chat_answers` reads both alike. Must
not: send, retry, or read tokens itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.core.response_delta import OnDelta, ResponseDelta, ToolCallDelta
from workers.llm.call_errors import error_in_body, malformed
from workers.llm.json_text import JsonError
from workers.llm.known_prompts import parse_answer

EVENT_STREAM = "text/event-stream"
#: The fields that a request for a stream has in addition.
STREAM_FIELDS: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")
_REASONING = ("reasoning_content", "reasoning")
#: Fields whose lists are continued by each chunk.
_GROWING = frozenset({"token_ids", "completion_token_ids", "output_token_ids"})


class ChatStreamReader:
    """One streamed completion.

    Args:
        on_delta: Called with each piece.
        url: The endpoint, for errors.
    """

    def __init__(self, on_delta: OnDelta, url: str) -> None:
        self._on_delta = on_delta
        self._url = url
        self._rest = b""
        self._body: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._message: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        #: Whether a piece was passed on; then the call cannot be repeated.
        self.has_begun = False
        self._is_done = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ModelError: An event is an error, or not a chunk of a completion.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    @property
    def is_complete(self) -> bool:
        """Whether the last event of the answer was read."""
        return self._is_done or self._choice.get("finish_reason") is not None

    def completion(self) -> dict[str, Any]:
        """Return the completion as an unstreamed answer would be."""
        if self._calls:
            self._message["tool_calls"] = [self._calls[key] for key in sorted(self._calls)]
        return {**self._body, "choices": [{**self._choice, "message": self._message}]}

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = parse_answer(data)
        except JsonError as error:
            raise malformed(f"{self._url} streamed JSON that does not parse: {error}") from None
        if not isinstance(chunk, Mapping):
            raise malformed(f"{self._url} streamed a chunk that is no object.")
        if error := error_in_body(chunk, self._url):
            raise error
        self._body |= {name: value for name, value in chunk.items() if _is_kept(name, value)}
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            self._take_choice(choices[0])

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        for name, value in choice.items():
            known = self._choice.get(name)
            if name in ("delta", "text") or value is None:
                continue
            if name == "logprobs" and isinstance(value, Mapping):
                self._add_logprobs(value)
            elif name in _GROWING and isinstance(value, list) and isinstance(known, list):
                known += value
            else:
                self._choice[name] = value
        delta = choice.get("delta")
        if delta is None and isinstance(choice.get("text"), str):
            delta = {"content": choice["text"]}  # a text completion
        if isinstance(delta, Mapping):
            self._take_delta(delta)

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        known = self._choice.setdefault("logprobs", {})
        for name in ("content", "tokens", "token_logprobs"):
            if isinstance(part := logprobs.get(name), list):
                known.setdefault(name, []).extend(part)

    def _take_delta(self, delta: Mapping[str, Any]) -> None:
        for name in _TEXTS:
            value = delta.get(name)
            if isinstance(value, str) and value:
                self._message[name] = self._message.get(name, "") + value
        if isinstance(details := delta.get("reasoning_details"), list):
            self._message.setdefault("reasoning_details", []).extend(details)
        calls = tuple(map(self._add_call, _mappings(delta.get("tool_calls"))))
        field = next((name for name in _REASONING if delta.get(name)), _REASONING[0])
        piece = ResponseDelta(
            text=str(delta.get("content") or delta.get("refusal") or ""),
            reasoning=str(delta.get(field) or ""),
            reasoning_field=field,
            tool_calls=calls,
        )
        if piece.text or piece.reasoning or calls:
            self.has_begun = True
            self._on_delta(piece)

    def _add_call(self, call: Mapping[str, Any]) -> ToolCallDelta:
        index = call.get("index")
        index = index if isinstance(index, int) else len(self._calls)
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        arguments = str(function.get("arguments") or "")
        known = self._calls.get(index)
        if known is None:
            call_id, name = str(call.get("id") or f"call_{index}"), str(function.get("name") or "")
            written = {"name": name, "arguments": arguments}
            self._calls[index] = {"id": call_id, "type": "function", "function": written}
            return ToolCallDelta(index, call_id, name, arguments)
        known["function"]["arguments"] += arguments
        return ToolCallDelta(index, arguments=arguments)


def _is_kept(name: str, value: Any) -> bool:
    return value is not None and name not in ("choices", "object")


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, Mapping)]
