"""The vocabulary and the chat template of the tiny policy.

Every token is one character, the marks of the template too. So text and tokens correspond one to
one, and the tokens of a turn are an exact prefix of the next turn's prompt, whatever was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VOCABULARY = "0123456789+-*/().=QATce;"
END = VOCABULARY.index(";")

_MARKS = {"user": "Q", "assistant": "A", "tool": "T"}
_IDS = {character: token for token, character in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Return the tokens of a text.

    Raises:
        ValueError: A character is not in the vocabulary.
    """
    unknown = sorted(set(text) - _IDS.keys())
    if unknown:
        raise ValueError(f"not in the vocabulary: {', '.join(map(repr, unknown))}")
    return [_IDS[character] for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    return "".join(VOCABULARY[token] for token in tokens)


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the prompt's tokens: a mark, the text and the end of each message, then `A`.

    Raises:
        ValueError: A role or a character is unknown.
    """
    parts: list[str] = []
    for message in messages:
        mark = _MARKS.get(str(message.get("role")))
        if mark is None:
            raise ValueError(f"unknown role {message.get('role')!r}")
        parts.append(f"{mark}{message.get('content') or ''};")
    return encode("".join(parts) + "A")
