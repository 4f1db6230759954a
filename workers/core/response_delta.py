"""A piece of a model's response, as a server streams it.

Made by the model clients, passed on by the gateway. Must not: know a wire format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.core.model_response import ModelResponse


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call; id and name come with its first piece.

    `index` counts the response's tool calls from 0; `arguments` is a piece of JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ResponseDelta:
    """The new part of a response since the last delta.

    `reasoning_field` is the field in which the server sent the reasoning.
    """

    text: str = ""
    reasoning: str = ""
    reasoning_field: str = "reasoning_content"
    tool_calls: tuple[ToolCallDelta, ...] = ()


#: Called with each delta, on the event loop, while the model still generates.
OnDelta = Callable[[ResponseDelta], None]


def delta_of(response: ModelResponse) -> ResponseDelta:
    """Return a whole response as one delta, for a server or a record that gave no pieces."""
    fields = response.metadata.get("reasoning_fields", {})
    named = next((name for name, value in fields.items() if type(value) is str), None)
    return ResponseDelta(
        text=response.text,
        reasoning=response.metadata.get("reasoning") or "",
        reasoning_field=named or "reasoning_content",
        tool_calls=tuple(
            ToolCallDelta(index, call.id, call.name, call.arguments)
            for index, call in enumerate(response.tool_calls)
        ),
    )
