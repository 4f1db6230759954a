"""JSON encoding and decoding: fast for valid text, tolerant of invalid text.

Model clients and the offline policy use it. Lone surrogates, NaN and invalid UTF-8 in an answer
become replacement characters or floats instead of an error. Must not: know any message format.
"""

from __future__ import annotations

import json
from typing import Any

import orjson


class JsonError(ValueError):
    """The bytes are not JSON, even for the tolerant parser."""


def parse_json(data: bytes) -> Any:
    """Parse JSON bytes; lone surrogates and invalid UTF-8 come back as U+FFFD.

    Raises:
        JsonError: The text is not JSON, incomplete, or nested deeper than the parser supports.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    # orjson rejects lone surrogates and NaN, but servers send them.
    try:
        return scrub_surrogates(json.loads(data.decode("utf-8", "replace")))
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error) or type(error).__name__) from None


def dump_json(value: Any) -> bytes:
    """Serialise to JSON bytes; lone surrogates become U+FFFD, because UTF-8 cannot encode them.

    Raises:
        TypeError: A value has no JSON form.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(
            scrub_surrogates(value), ensure_ascii=False, separators=(",", ":")
        ).encode()


def scrub_surrogates(value: Any) -> Any:
    """Return the value with every lone surrogate in its strings replaced."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {scrub_surrogates(key): scrub_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_surrogates(item) for item in value]
    return value
