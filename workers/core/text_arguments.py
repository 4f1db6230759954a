"""Read a call's arguments that a model wrote as text elements, in the types of the tool's schema.

Used by `text_calls` for formats whose values have no quotes: `<parameter=name>` (Qwen3-Coder,
Seed-OSS), `<parameter name="...">` (MiniMax, DeepSeek V3.2) and `<arg_key>` (GLM). Must not: reject
a value; the tool checks its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workers.core.call_parser import CallParseError, parse_value
from workers.core.tool_schemas import OpenAIFunctionToolSchema

_DSML = "(?:\uff5cDSML\uff5c)?"
_PARAMETER = re.compile(
    rf"<(?:\w+:)?{_DSML}parameter(?:=|\s+name=)\"?(?P<name>[\w.\-]{{1,100}})\"?"
    r"(?:\s+string=\"(?P<string>true|false)\")?\s*>"
    rf"(?P<value>.*?)(?:</(?:\w+:)?{_DSML}parameter>|(?=<(?:\w+:)?{_DSML}parameter[=\s])|\Z)",
    re.DOTALL,
)
_GLM = re.compile(
    r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>|\Z)", re.DOTALL
)
_LITERALS = {"true": True, "false": False, "null": None, "none": None}


def read_xml_arguments(body: str, schema: OpenAIFunctionToolSchema | None) -> dict[str, Any]:
    """Return the arguments of `<parameter>` elements."""
    arguments: dict[str, Any] = {}
    for found in _PARAMETER.finditer(body):
        # The templates put each value on lines of its own.
        value = found["value"].removeprefix("\n").removesuffix("\n")
        is_text = found["string"] == "true"
        arguments[found["name"]] = value if is_text else _typed(value, found["name"], schema)
    return arguments


def read_glm_arguments(body: str, schema: OpenAIFunctionToolSchema | None) -> dict[str, Any]:
    """Return the arguments of `<arg_key>` and `<arg_value>` elements."""
    arguments: dict[str, Any] = {}
    for found in _GLM.finditer(body):
        name = found["name"].strip()
        arguments[name] = _typed(found["value"], name, schema)
    return arguments


def _typed(value: str, name: str, schema: OpenAIFunctionToolSchema | None) -> Any:
    """Return a value in the type of its parameter; text where the schema allows text."""
    types = _types(schema.function.parameters.properties.get(name)) if schema else set[str]()
    if "string" in types:
        return value
    text = value.strip()
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    try:
        parsed, end = parse_value(text)
    except CallParseError:
        return value
    return parsed if end == len(text) else value


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types: set[str] = {given} if isinstance(given, str) else set(given or ())
    for keyword in ("anyOf", "oneOf"):
        for option in schema.get(keyword) or ():
            types |= _types(option)
    if not types and all(isinstance(item, str) for item in schema.get("enum") or (0,)):
        types.add("string")
    return types
