"""Parses the answers of long conversations without parsing the ids of an earlier prompt again.

A server returns the ids of the whole prompt with each call, and a prompt begins with the one before
it. `ModelCalls` keeps the `KnownPrompts` of its attempt, and the readers of answers call
`parse_answer`. Any answer that is not exactly of the expected form is parsed as a whole. Must not:
return another value than the whole parse, except for an array of prompt ids in place of a list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from secrets import token_hex
from typing import Any, NamedTuple

import orjson

from pipeline.tokens.prompt_prefixes import MAX_ID
from workers.llm.json_text import parse_json

#: Shorter answers are parsed as a whole, which costs them nothing more.
_LONG_BYTES = 16 * 1024
#: Conversations of an attempt whose ids are kept: its newest, of parallel agents for example.
_MOST_KEPT = 4
_FIELD = "prompt_token_ids"
_KEY = b'"prompt_token_ids":'
#: Replaces the list of ids while the rest is parsed. No server can know this value, so the field
#: with this value is the one whose list was replaced.
_PLACEHOLDER = token_hex(16)


class _Prompt(NamedTuple):
    text: bytes  #: the JSON of its ids, without the brackets
    ids: array[int]


_NONE = _Prompt(b"", array("I"))


class KnownPrompts:
    """The prompts of one attempt, as its last answers had them."""

    def __init__(self) -> None:
        self._kept: list[_Prompt] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the calls of this task use these prompts, and add to them."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)

    def parse(self, data: bytes) -> Any:
        """Parse an answer; None if it has to be parsed as a whole."""
        opening = _opening_of_list(data)
        if opening is None:
            return None
        start = opening + 1
        known = next((each for each in self._kept if _begins(data, start, each)), _NONE)
        known_end = start + len(known.text)
        closing = data.find(b"]", known_end)
        if closing < 0:
            return None
        try:
            ids = known.ids + _new_ids(data[known_end:closing], known)
            body = orjson.loads(
                b'%b"%b"%b' % (data[:opening], _PLACEHOLDER.encode(), data[closing + 1 :])
            )
        except (ValueError, TypeError, OverflowError):
            return None
        holder = _holder_of_placeholder(body)
        if holder is None:
            return None
        holder[_FIELD] = ids
        kept = [each for each in self._kept if each is not known]
        self._kept = [_Prompt(data[start:closing], ids), *kept[: _MOST_KEPT - 1]]
        return body


_in_use: ContextVar[KnownPrompts | None] = ContextVar("known_prompts", default=None)


def parse_answer(data: bytes) -> Any:
    """Parse JSON bytes as `parse_json` does; long prompts have their ids as an array of kind `I`.

    Raises:
        JsonError: As in `parse_json`.
    """
    known = _in_use.get() if len(data) >= _LONG_BYTES else None
    body = None if known is None else known.parse(data)
    return parse_json(data) if body is None else body


def _opening_of_list(data: bytes) -> int | None:
    """Return the position of the bracket behind the field's first name; None: there is none.

    Inside a JSON string the quotes of the name are escaped, so the name is not found there.
    """
    at = data.find(_KEY)
    opening = at + len(_KEY)
    if data[opening : opening + 1] == b" ":
        opening += 1
    return opening if at >= 0 and data[opening : opening + 1] == b"[" else None


def _begins(data: bytes, start: int, known: _Prompt) -> bool:
    """Say whether the list at `start` begins with all ids of a prompt; 12 does not begin 123."""
    end = start + len(known.text)
    return data.startswith(known.text, start) and data[end : end + 1] in (b",", b"]")


def _new_ids(text: bytes, known: _Prompt) -> array[int]:
    """Return the ids in the JSON behind a known prompt.

    Raises:
        ValueError: The text is not the JSON of ids, separated by commas.
        TypeError: An item is not an integer.
        OverflowError: An item is negative or does not fit into 31 bits, or there is none.
    """
    if known.text:
        if not text:
            return array("I")
        text = text[1:]  # a comma
    if b"e" in text:
        raise ValueError("a word or a float")  # an array takes True for 1
    ids = array("I", orjson.loads(b"[%b]" % text))
    if not ids or max(ids) > MAX_ID:
        raise OverflowError("no ids, or one that does not fit into 31 bits")
    return ids


def _holder_of_placeholder(body: Any) -> dict[str, Any] | None:
    """Return the object whose ids were replaced: the answer (vLLM), or its choice (SGLang)."""
    if not isinstance(body, dict):
        return None
    if body.get(_FIELD) == _PLACEHOLDER:
        return body
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) and choice.get(_FIELD) == _PLACEHOLDER else None
