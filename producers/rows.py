"""Rows of a dataset: read, rejected, and converted to values that can be stored.

The readers yield `Row` and `BadRow`; `datasets.py` turns rows into prompts. Must not: know a file
format, or accept a value that PostgreSQL's jsonb or our JSON encoder would reject later.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import InputError

PREVIEW_CHARS = 500
_INTEGERS = range(-(2**63), 2**64)

E_SOURCE = "E111"  #: not found, not readable, or of no known format
E_EXTRA = "E112"  #: the reader of its format is not installed
E_EMPTY = "E113"  #: no rows
E_ROW = "E114"  #: not a JSON object
E_PROMPT = "E115"  #: without a prompt
E_DUPLICATE = "E116"  #: an earlier row has the same id
E_TOO_LONG = "E117"  #: longer than allowed
E_ENCODING = "E118"  #: not UTF-8
E_VALUE = "E119"  #: a value that cannot be stored


@dataclass(frozen=True, slots=True)
class Row:
    """A row that was read, with its location."""

    row_no: int
    location: str
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot become a prompt; `raw` is the beginning of its text, safe to print."""

    row_no: int
    location: str
    code: str
    reason: str
    remedy: str
    raw: str

    def error(self) -> InputError:
        """Return the error that is raised if bad rows are not skipped."""
        stop = "" if self.reason.endswith((".", "?")) else "."
        message = f"{self.location}: {self.reason}{stop}"
        hint = f"{self.remedy} --skip-bad goes on without such rows.".strip()
        return InputError(message, remedy=hint, code=self.code)


class Unstorable(ValueError):
    """A value cannot be stored; carries the path to the value."""


def preview(raw: bytes | str) -> str:
    """Return the beginning of a row with unprintable characters escaped."""
    if isinstance(raw, bytes):
        raw = raw[:PREVIEW_CHARS].decode("utf-8", "backslashreplace")
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in raw[:PREVIEW_CHARS]
    )


def storable(value: Any, *, max_chars: int, path: str = "") -> Any:
    """Return `value` as plain JSON data.

    NaN becomes null, because it means a missing value in tables. Dates and times become ISO 8601
    text, durations seconds, decimals numbers if exact and otherwise text, bytes base64 text, UUIDs
    text, tuples and arrays lists.

    Raises:
        Unstorable: NUL characters, lone surrogates, infinities, whole numbers beyond 64 bits, text
            longer than `max_chars`, or a type without a JSON form.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, max_chars, path)
    if isinstance(value, int):
        return _integer(value, path)
    if isinstance(value, float):
        return _float(value, path)
    if isinstance(value, Mapping):
        return {
            _key(key, max_chars, path): storable(
                item, max_chars=max_chars, path=f"{path}.{key}" if path else str(key)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            storable(item, max_chars=max_chars, path=f"{path}[{index}]")
            for index, item in enumerate(value)
        ]
    return storable(_converted(value, path), max_chars=max_chars, path=path)


def _converted(value: Any, path: str) -> Any:
    """Convert a value of a type that JSON lacks; the result may need another conversion."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return _decimal(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode()
    if isinstance(value, uuid.UUID):
        return str(value)
    # Arrays and scalars of numpy, pandas and torch, without an import of these packages.
    if callable(to_list := getattr(value, "tolist", None)):
        plain = to_list()
        if type(plain) is not type(value):
            return plain
    raise Unstorable(f"field `{path}` holds a {type(value).__name__}, which has no form in JSON")


def _text(value: str, max_chars: int, path: str) -> str:
    if len(value) > max_chars:
        raise Unstorable(f"field `{path}` holds {len(value):,} characters (limit {max_chars:,})")
    if "\0" in value:
        raise Unstorable(
            f"field `{path}` holds a NUL character (\\u0000), which PostgreSQL cannot store"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"\\u{ord(value[error.start]):04x}"
            raise Unstorable(
                f"field `{path}` holds half of a character (lone surrogate {found})"
            ) from error
    return value


def _key(key: Any, max_chars: int, path: str) -> str:
    if not isinstance(key, str):
        key = str(key)
    return _text(key, max_chars, f"{path}.{preview(key)}" if path else preview(key))


def _integer(value: int, path: str) -> int:
    if value not in _INTEGERS:
        raise Unstorable(f"field `{path}` holds a whole number beyond 64 bits; write it as text")
    return int(value)


def _float(value: float, path: str) -> float | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise Unstorable(f"field `{path}` holds an infinite number")
    return float(value)


def _decimal(value: decimal.Decimal) -> int | float | str | None:
    if value.is_nan():
        return None
    if value == value.to_integral_value() and value.is_finite():
        return int(value)
    return float(value) if decimal.Decimal(repr(float(value))) == value else str(value)
