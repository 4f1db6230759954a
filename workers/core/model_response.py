"""The response of a model call, the same for all clients.

Made by the clients in `workers/llm`; read by agents. A user's own `llm_generate_func` may return a
string, a dict with "content", or an object with `.text`; `as_model_response` converts them. Must
not: parse the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NativeToolCall:
    """A tool call in the OpenAI format; `arguments` is the model's JSON text, not yet parsed."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Return the element of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """One response of a model.

    Token counts are the server's usage, else None. Token ids and logprobs are those recorded at
    sampling, never computed from text; the two completion arrays have equal length.
    """

    text: str
    tool_calls: tuple[NativeToolCall, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None
    response_id: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: list[float] | None = None
    policy_version: int | None = None
    latency_ms: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """Return the assistant message to append to the conversation.

        With tool calls it carries the reasoning in the fields in which the server sent it
        (`metadata["reasoning_fields"]`): models that reason between calls need it again, and some
        APIs reject a call without it. The reasoning of an answer is not sent again.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message |= self.metadata.get("reasoning_fields", {})
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        return message


def as_model_response(value: Any) -> ModelResponse:
    """Convert the return value of an `llm_generate_func`.

    Raises:
        TypeError: The value is neither a str, a dict with "content", nor an object with `.text`.
    """
    if isinstance(value, ModelResponse):
        return value
    if isinstance(value, str):
        return ModelResponse(text=value)
    if isinstance(value, Mapping) and "content" in value:
        return ModelResponse(
            text=value["content"] or "", tool_calls=_tool_calls(value.get("tool_calls"))
        )
    text = getattr(value, "text", None)
    if isinstance(text, str):
        return ModelResponse(text=text, tool_calls=_tool_calls(getattr(value, "tool_calls", None)))
    raise TypeError(
        f"llm_generate_func returned {type(value).__name__}; expected str, a dict with "
        '"content", or an object with .text'
    )


def _tool_calls(calls: Any) -> tuple[NativeToolCall, ...]:
    return tuple(_tool_call(call, number) for number, call in enumerate(calls or ()))


def _tool_call(call: Any, number: int) -> NativeToolCall:
    if isinstance(call, NativeToolCall):
        return call
    if not isinstance(call, Mapping):
        call = call.model_dump()
    function = call.get("function", call)
    return NativeToolCall(
        id=str(call.get("id") or f"call_{number}"),
        name=str(function["name"]),
        arguments=str(function.get("arguments") or "{}"),
    )
