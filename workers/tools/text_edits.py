"""Edits of a text as values: replace, insert, select and number lines.

Used by the file editor. Pure functions without files or tool results. Time and memory are
proportional to the text for any parameters.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

_CONTEXT_LINES = 4
_MAX_LISTED_LINES = 10


class EditError(ValueError):
    """An impossible edit; the message is for the model."""


def replace_once(text: str, old: str, new: str) -> tuple[str, int]:
    """Return the text with its one occurrence of `old` replaced, and its position.

    Raises:
        EditError: `old` is empty, missing, ambiguous, or the same as `new`.
    """
    if not old:
        raise EditError("old_str is empty; use insert or create")
    if "\r\n" in text and "\r" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    if old == new:
        raise EditError("old_str and new_str are the same")
    at = text.find(old)
    if at < 0:
        raise EditError(f"old_str was not found{_similar_line(text, old)}")
    # Search from the next character, because overlapping occurrences are ambiguous, too.
    if text.find(old, at + 1) >= 0:
        lines = _lines_of_all(text, old)
        raise EditError(
            f"old_str occurs several times, at lines {lines}; add lines around it until it is "
            "unique"
        )
    return text[:at] + new + text[at + len(old) :], at


def insert_lines(text: str, line: int, new: str) -> tuple[str, int]:
    """Return the text with `new` as separate lines after line `line`, and their position.

    Raises:
        EditError: There is no such line.
    """
    lines = _lines_with_ends(text)
    if not 0 <= line <= len(lines):
        raise EditError(f"insert_line is {line}; the file has lines 0 to {len(lines)}")
    end = "\r\n" if "\r\n" in text else "\n"
    before, after = "".join(lines[:line]), "".join(lines[line:])
    if before and not before.endswith("\n"):
        before += end
    if new and not new.endswith("\n") and (after or text.endswith("\n")):
        new += end
    return before + new + after, len(before)


def select_lines(text: str, view_range: Sequence[int] | None) -> tuple[int, list[str]]:
    """Return the number of the first line, and the lines of the range.

    Raises:
        EditError: The range is invalid, or begins beyond the end.
    """
    lines = _lines(text)
    if view_range is None:
        return 1, lines
    if len(view_range) != 2:
        raise EditError("view_range takes two numbers: first and last line")
    first, last = view_range
    last = len(lines) if last == -1 else last
    if not 1 <= first <= max(1, len(lines)) or last < first:
        raise EditError(f"view_range {list(view_range)} is none of lines 1 to {len(lines)}")
    return first, lines[first - 1 : last]


def numbered(lines: Sequence[str], first: int) -> str:
    """Return the lines with their numbers."""
    return "\n".join(f"{number:6d}\t{line}" for number, line in enumerate(lines, first))


def show_around(text: str, at: int) -> str:
    """Return the lines around a position, with their numbers."""
    line = text.count("\n", 0, at)
    lines = _lines(text)
    first = max(0, line - _CONTEXT_LINES)
    return numbered(lines[first : line + _CONTEXT_LINES + 1], first + 1)


def _lines_with_ends(text: str) -> list[str]:
    """Split a text where `grep`, compilers and the search tool do; a form feed ends no line."""
    return list(io.StringIO(text, newline="\n"))


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\n").removesuffix("\r") for line in _lines_with_ends(text)]


def _lines_of_all(text: str, old: str) -> str:
    numbers: list[int] = []
    at = text.find(old)
    while at >= 0 and len(numbers) < _MAX_LISTED_LINES:
        numbers.append(text.count("\n", 0, at) + 1)
        at = text.find(old, at + 1)
    more = " and more" if at >= 0 else ""
    return ", ".join(map(str, numbers)) + more


def _similar_line(text: str, old: str) -> str:
    """Return a hint at a line that differs from the first one of `old` only by white space."""
    first_line = next((line.strip() for line in _lines(old) if line.strip()), "")
    if not first_line:
        return ""
    for number, line in enumerate(_lines(text), 1):
        if line.strip() == first_line:
            return f"; line {number} begins it, but white space or a later line differs: {line!r}"
    return "; view the file and copy the text exactly"
