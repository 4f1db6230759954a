"""The field of reasoning, kept while the reasoning passes through another dialect and back.

A server reads its model's earlier reasoning in one field of the assistant's message. Other dialects
have a signed or encrypted text beside the reasoning; the gateway writes the field's name there.
Must not: change reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_FIELD = "reasoning_content"
_MARK = "field:"
#: The mark of reasoning that came back without one.
DEFAULT_MARK = f"{_MARK}{DEFAULT_FIELD}"
#: The fields whose value is the reasoning's text.
_FIELDS = frozenset({"reasoning_content", "reasoning"})


def reasoning_mark(fields: Mapping[str, Any]) -> str:
    """Return the text beside the reasoning of a response with these `reasoning_fields`."""
    return mark_of(next((name for name in fields if name in _FIELDS), DEFAULT_FIELD))


def mark_of(field: str) -> str:
    """Return the text beside the reasoning of one field."""
    return f"{_MARK}{field}"


def restored_reasoning(
    message: dict[str, Any], text: str, mark: Any, block: Mapping[str, Any]
) -> None:
    """Put reasoning that came back into an assistant's message.

    Args:
        message: The message in the OpenAI format.
        text: The reasoning.
        mark: The text beside it.
        block: Anthropic's block, kept unchanged if the gateway did not mark it.
    """
    field = mark.removeprefix(_MARK) if isinstance(mark, str) else ""
    if field in _FIELDS:
        message[field] = message.get(field, "") + text
    else:
        message.setdefault("thinking_blocks", []).append(dict(block))
