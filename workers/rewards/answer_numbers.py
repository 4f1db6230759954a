r"""Finds the number that an answer states.

The rewards `gsm8k` and `numeric` use it. Supported: thousands separators, currency, units, signs,
decimals, fractions, mixed numbers, percent (read as a unit), LaTeX, \boxed{…}, `####`.
Must not compare, or take more than linear time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

_MARK = "####"
_BOXES = ("\\boxed", "\\fbox")
_MAX_CHARS = 200_000  # read from the end of the text, because the answer is there
_MAX_DIGITS = 60

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.])[-+](?=[$€£¥\d.]))?
    (?:[$€£¥][ ]?(?P<inner_sign>[-+](?=[\d.]))?)?
    (?:(?P<whole>\d{{1,9}})[ ]+(?=\d{{1,9}}[ ]?/[ ]?\d))?
    (?P<digits>{_DIGITS})
    (?:[eE](?P<exponent>[-+]?\d{{1,3}})(?![\w.]))?
    (?:[ ]?/[ ]?(?P<below>\d+(?:\.\d+)?))?
    """,
    re.VERBOSE,
)
_FRACTION = r"\\[dt]?frac\s*\{\s*([^{}]{1,40})\}\s*\{\s*([^{}]{1,40})\}"
_LATEX = (
    (re.compile(rf"(?<=[-+]){_FRACTION}"), r"\1/\2 "),  # a sign must stay beside its number
    (re.compile(_FRACTION), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r" \1/\2 "),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]{0,200})\}"), r" \1 "),
    (re.compile(r"\{,\}|\\!,|,\\!|(?<=\d)\\,(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\[,;:! ]|\\left|\\right|\\quad|~"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
)
_SPACES = str.maketrans({"\u00a0": " ", "\u2009": " ", "\u202f": " ", "−": "-", "－": "-"})


def stated_number(text: str) -> Fraction | None:
    r"""Return the number in the last box, else after the last `####`, else the last number.

    A box or `####` without a number is ignored.
    """
    text = text[-_MAX_CHARS:]
    boxed = last_boxed(text)
    if boxed is not None:
        number = _after_equals(boxed)
        if number is not None:
            return number
    _, mark, after = text.rpartition(_MARK)
    if mark:
        number = _after_equals(after.strip().split("\n", 1)[0])
        if number is not None:
            return number
    last = deque(_numbers(text), maxlen=1)
    return last[0] if last else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, including nested braces; None without one."""
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    brace = text.find("{", start)
    if brace < 0:
        return None
    depth = 0
    for position in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[brace + 1 : position]
    return text[brace + 1 :]  # a token limit cut the answer off: use the part before


def _after_equals(text: str) -> Fraction | None:
    """Return the first number after the last `=`, else the first of all."""
    number = next(_numbers(text.rpartition("=")[2]), None)
    return next(_numbers(text), None) if number is None else number


def _numbers(text: str) -> Iterator[Fraction]:
    plain = text.translate(_SPACES)
    for pattern, replacement in _LATEX:
        plain = pattern.sub(replacement, plain)
    for match in _NUMBER.finditer(plain):
        number = _value(match)
        if number is not None:
            yield number


def _value(match: re.Match[str]) -> Fraction | None:
    digits, below = match["digits"].replace(",", ""), match["below"]
    if len(digits) > _MAX_DIGITS or len(below or "") > _MAX_DIGITS:
        return None
    number = Fraction(digits)
    if match["exponent"]:
        number *= Fraction(10) ** int(match["exponent"])
    if below is not None and Fraction(below):
        number /= Fraction(below)
    number += int(match["whole"] or 0)
    return -number if "-" in (match["sign"], match["inner_sign"]) else number
