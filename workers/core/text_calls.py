"""Find tool calls that a server left in a model's text.

Used by `reply_parser` where a reply has no native calls. A format with marks of its own, such as
`<tool_call>` or `[TOOL_CALLS]`, counts anywhere in the output. JSON, fenced blocks and Python calls
can also be an answer; `find_unmarked_calls` finds them only at the end of a text, and only if they
call offered tools. Must not: run a call, or raise for any text of a model.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from workers.core.call_formats import (
    ALL_MARKED,
    ANY_MARK,
    AUTO,
    FAMILIES,
    UNMARKED,
    CallFormat,
    Tools,
    bound_call,
    read_whole,
)
from workers.core.call_parser import CallParseError, ParsedCall

#: Number of positions near the end of a text at which an unmarked call may begin.
_MOST_CANDIDATES = 30
_CANDIDATE = re.compile(
    r"^[ \t]*(?=```|[\[{]|[A-Za-z_][\w.]{0,100}\()|(?=\{\s{0,20}[\"'](?:name|function|tool)\b)",
    re.MULTILINE,
)


class TextCall(NamedTuple):
    """One call in a text: its arguments, or the problem that kept them from being read."""

    written: str
    end: int  #: position behind the call, and behind the marks that close it
    name: str | None = None
    args: dict[str, Any] | None = None
    problem: str | None = None


class TextCalls(NamedTuple):
    """The calls of a text in order, at least one, and the position where the first begins."""

    start: int
    calls: list[TextCall]


def find_marked_calls(text: str, tools: Tools, tool_format: str = AUTO) -> TextCalls | None:
    """Return the calls that have a family's marks; None if the text has no such mark.

    A call that cannot be read is one with a `problem`. Text between calls is ignored.
    """
    if tool_format == AUTO and not ANY_MARK.search(text):
        return None
    formats = ALL_MARKED if tool_format == AUTO else FAMILIES[tool_format]
    calls: list[TextCall] = []
    start, at = None, 0
    while found := _next_opening(text, at, formats):
        form, opening = found
        begin, problem, parsed = opening.start(), None, []
        try:
            parsed, end = form.read(text, opening, tools)
        except CallParseError as error:
            problem, end = str(error), opening.end()
            closing = form.closing.search(text, end)
            end = closing.start() if closing else len(text)
        closing = form.closing.match(text, end)
        at = max(closing.end() if closing else end, opening.end())
        start = begin if start is None else start
        written = text[begin:at].strip()
        if problem is not None:
            calls.append(TextCall(written, at, problem=problem))
        for call in parsed:
            calls.append(_text_call(call, written, at, tools))
    return TextCalls(start, calls) if calls and start is not None else None


def find_unmarked_calls(text: str, tools: Tools, tool_format: str = AUTO) -> TextCalls | None:
    """Return the calls that end a text as JSON, as a fenced block or in Python syntax.

    Only calls of offered tools count, and all of a form's calls must be such.
    """
    if not tools or tool_format not in UNMARKED:
        return None
    end = len(text.rstrip())
    candidates = [match.start() for match in _CANDIDATE.finditer(text)]
    first = len(text) - len(text.lstrip())
    for start in [first, *candidates[-_MOST_CANDIDATES:]]:
        try:
            parsed = read_whole(text[start:end].strip(), tools)
            calls = [_text_call(call, text[start:end].strip(), end, tools) for call in parsed]
        except CallParseError:
            continue
        if calls and all(call.name in tools for call in calls):
            return TextCalls(start, calls)
    return None


def _next_opening(
    text: str, at: int, formats: tuple[CallFormat, ...]
) -> tuple[CallFormat, re.Match[str]] | None:
    found = [(form, match) for form in formats if (match := form.opening.search(text, at))]
    return min(found, key=lambda item: item[1].start(), default=None)


def _text_call(call: ParsedCall, written: str, end: int, tools: Tools) -> TextCall:
    try:
        bound = bound_call(call, tools)
    except CallParseError as error:
        return TextCall(written, end, problem=str(error))
    return TextCall(written, end, bound.name, bound.args)
