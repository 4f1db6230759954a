"""Convert any Python value to JSON types, without loss where JSON has the value.

Used by `Trajectory.to_dict`. Must not: import anything but the standard library, raise, or recurse
without bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

MAX_DEPTH = 100
MAX_INTEGER_BITS = 13_000  # Python refuses to write longer ones in decimal
TOO_DEEP = "<nested too deep>"


def json_safe(value: Any, depth: int = 0) -> Any:
    """Return the value in JSON types.

    Values that JSON does not have become: NaN and infinities their names as text; integers of more
    than 3900 digits hexadecimal text; tuples and sets lists; keys text; bytes text, with escapes
    where they cannot be decoded; dataclasses, pydantic models and numpy values their content; all
    others `str`. Values below depth 100 become a fixed text.
    """
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        return value if value.bit_length() <= MAX_INTEGER_BITS else hex(value)
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if depth >= MAX_DEPTH:
        return TOO_DEEP
    if kind is list:
        return [json_safe(item, depth + 1) for item in value]
    if kind is dict or isinstance(value, Mapping):
        return {_key(key): json_safe(item, depth + 1) for key, item in value.items()}
    return _other_json(value, depth)


def _key(key: Any) -> str:
    return key if type(key) is str else str(key.value if isinstance(key, Enum) else key)


def _other_json(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        return json_safe(value.value, depth + 1)
    for plain in (str, int, float):
        if isinstance(value, plain):
            return json_safe(plain(value), depth + 1)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", errors="backslashreplace")
    if isinstance(value, list | tuple | AbstractSet):
        return [json_safe(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return {name: json_safe(getattr(value, name, None), depth + 1) for name in names}
    for method in ("model_dump", "tolist"):
        if callable(convert := getattr(value, method, None)) and not isinstance(value, type):
            try:
                return json_safe(convert(), depth + 1)
            except Exception as error:  # a foreign object's own conversion: any failure is possible
                return f"<{type(value).__name__}: {error}>"
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # a foreign object's own __str__: a record must still be made
        return f"<{type(value).__name__}>"
