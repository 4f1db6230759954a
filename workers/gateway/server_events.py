"""Server-sent events, in which all dialects stream.

Must not: know a dialect. Source: HTML standard, section "Server-sent events".
"""

from __future__ import annotations

from typing import Any

from workers.llm.json_text import dump_json

#: The event after which OpenAI's streams end.
DONE = b"data: [DONE]\n\n"


def data_event(value: Any) -> bytes:
    """Return an event without a name."""
    return b"data: " + dump_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Return an event whose name is its field `type`."""
    return b"event: " + value["type"].encode() + b"\n" + data_event(value)
