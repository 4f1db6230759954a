"""Chooses a row's columns for prompt and answer, and makes the payload.

`datasets.py` calls it for each row. A payload has the prompt as `content` (text) or `messages`
(chat), the gold answer as `answer` if there is one, and every other column under its own name. A
column whose name collides with one of these three is kept as `original_<name>`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

PROMPT_FIELDS = ("prompt", "question", "input", "problem", "content", "instruction", "messages")
ANSWER_FIELDS = ("answer", "solution", "target", "gold", "label", "output")
RESERVED = ("content", "messages", "answer")


class NoPrompt(ValueError):
    """The row has no usable prompt; carries the reason and a remedy."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def make_payload(
    columns: Mapping[str, Any], *, prompt_field: str | None, answer_field: str | None
) -> dict[str, Any]:
    """Return the payload of a row.

    Raises:
        NoPrompt: The field is missing, or holds neither text nor chat messages.
    """
    prompt_from = _chosen(columns, prompt_field, "prompt")
    if prompt_from is None:
        prompt_from = _first_present(columns, PROMPT_FIELDS)
    if prompt_from is None:
        raise _no_prompt_field(columns)
    answer_from = _chosen(columns, answer_field, "answer")
    if answer_from is None and answer_field is None:
        answer_from = _first_present(columns, ANSWER_FIELDS, but=prompt_from)

    payload = {_prompt_key(prompt_from, columns[prompt_from]): columns[prompt_from]}
    if answer_from is not None:
        payload["answer"] = columns[answer_from]
    for name, value in columns.items():
        if name not in (prompt_from, answer_from):
            payload[f"original_{name}" if name in RESERVED else name] = value
    return payload


def _chosen(columns: Mapping[str, Any], field: str | None, role: str) -> str | None:
    if field is None or columns.get(field) is not None:
        return field
    state = "is null" if field in columns else "is missing"
    near = difflib.get_close_matches(field, columns, n=1)
    hint = f". Did you mean `{near[0]}`?" if near and near[0] != field else ""
    raise NoPrompt(
        f"the {role} field `{field}` {state}; the row has: {_names(columns)}{hint}",
        f"Name it with --{role}-field.",
    )


def _first_present(
    columns: Mapping[str, Any], fields: tuple[str, ...], *, but: str = ""
) -> str | None:
    return next((f for f in fields if f != but and columns.get(f) is not None), None)


def _no_prompt_field(columns: Mapping[str, Any]) -> NoPrompt:
    return NoPrompt(
        f"no prompt field ({', '.join(PROMPT_FIELDS)}); the row has: {_names(columns)}",
        "Name it with --prompt-field.",
    )


def _prompt_key(field: str, value: Any) -> str:
    """Return the payload's key for a prompt: `content` for text, `messages` for chat messages."""
    if isinstance(value, str):
        if not value.strip():
            raise NoPrompt(f"the prompt field `{field}` is empty")
        return "content"
    if not isinstance(value, list):
        kind = "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise NoPrompt(f"the prompt field `{field}` holds {kind}, not text or chat messages")
    if not value:
        raise NoPrompt(f"the prompt field `{field}` holds no messages")
    for index, message in enumerate(value):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise NoPrompt(
                f"the prompt field `{field}` is a list, and item {index} is no chat message "
                "(an object with `role` and `content`)"
            )
    return "messages"


def _names(columns: Mapping[str, Any]) -> str:
    return ", ".join(list(columns)[:30]) or "nothing"
