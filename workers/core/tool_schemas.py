"""Tool schemas in the OpenAI format, the checking of parameters against them, and `ToolResult`.

Used by every tool and by the agents that show tools to a model. Checked is the part of JSON Schema
that tool schemas use: types, enums, required, nested objects and lists. Must not: run a tool, or
know any particular one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_SCHEMA_DEPTH = 32
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


class ToolResult(BaseModel):
    """The result of one tool call.

    `result` is for code; `shown` is the text for the model, by default the result as text. `error`
    is the reason of a failure. `reward_score` 0.0 means that the tool gives no reward. `stop` asks
    the agent to end the trajectory after this call.
    """

    success: bool
    result: Any = None
    shown: str | None = None
    error: str | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    reward_score: float = 0.0
    stop: bool = False

    def to_text(self) -> str:
        """Return the text that the model is shown."""
        if not self.success:
            return f"Error: {self.error or 'the tool failed and gave no reason'}"
        return result_text(self.result) if self.shown is None else self.shown


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function as JSON Schema; other schema keywords are kept as given."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"] = "object"
    properties: dict[str, Any] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """Name, purpose and parameters of a function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=OpenAIFunctionParametersSchema
    )


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in the format of the OpenAI chat API."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def to_openai(self) -> dict[str, Any]:
        """Return the element to put into the request's `tools` list."""
        return {"type": "function", "function": self.function.model_dump()}


def create_openai_tool_schema(
    name: str,
    description: str,
    parameters: Mapping[str, Any],
    required: Sequence[str] | None = None,
) -> OpenAIFunctionToolSchema:
    """Build a tool schema.

    Args:
        name: Name by which the model calls the tool.
        description: Purpose of the tool, for the model.
        parameters: Parameter name to its JSON Schema; or a whole schema of type "object".
        required: Names that must be given; None keeps those of a whole schema.
    """
    is_whole_schema = parameters.get("type") == "object"
    schema: dict[str, Any] = (
        dict(parameters) if is_whole_schema else {"properties": dict(parameters)}
    )
    if required is not None:
        schema["required"] = list(required)
    return OpenAIFunctionToolSchema(
        function=OpenAIFunctionSchema(
            name=name,
            description=description,
            parameters=OpenAIFunctionParametersSchema.model_validate(schema),
        )
    )


def parameter_problems(params: Mapping[str, Any], schema: OpenAIFunctionToolSchema) -> list[str]:
    """Return one sentence per parameter that does not fit; empty when all fit."""
    if not isinstance(params, Mapping):
        return [f"parameters must be an object, not {type(params).__name__}"]
    as_schema: dict[str, Any] = {
        "additionalProperties": False,
        **schema.function.parameters.model_dump(),
    }
    return list(_object_problems(params, as_schema, where="", depth=0))


def as_tool_result(value: Any) -> ToolResult:
    """Take a `ToolResult` as it is, also one of the same shape (a dict or object with `success`).

    Any other value is the result of a success.
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("success"), bool):
        if set(value) <= ToolResult.model_fields.keys():
            return ToolResult.model_validate(value)
        error = None if value["success"] else str(value.get("error") or "the tool failed")
        return ToolResult(success=value["success"], result=dict(value), error=error)
    return ToolResult(success=True, result=value)


def result_text(value: Any) -> str:
    """Return a tool's result as text for a model: strings as they are, the rest as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "(no output)"
    if isinstance(value, BaseModel):
        value = value.model_dump()
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def cut_middle(text: str, limit: int) -> str:
    """Return the text; if it exceeds the limit, its head and tail with a notice between them."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    notice = f"[... {len(text) - limit} of {len(text)} characters cut here ...]"
    return f"{text[:head]}\n{notice}\n{text[len(text) - tail :]}"


def _object_problems(
    value: Mapping[str, Any], schema: Mapping[str, Any], *, where: str, depth: int
) -> list[str]:
    known: Mapping[str, Any] = schema.get("properties") or {}
    problems = [
        f"missing required parameter {where}{name!r}"
        for name in schema.get("required") or ()
        if name not in value
    ]
    extra = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in known:
            problems += _value_problems(item, known[name], where=f"{where}{name}", depth=depth + 1)
        elif extra is False:
            names = ", ".join(known) or "none"
            problems.append(f"unknown parameter {where}{name!r}; known parameters: {names}")
        elif isinstance(extra, Mapping):
            problems += _value_problems(item, extra, where=f"{where}{name}", depth=depth + 1)
    return problems


def _value_problems(value: Any, schema: Any, *, where: str, depth: int) -> list[str]:
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return []
    for keyword in ("anyOf", "oneOf"):
        if options := schema.get(keyword):
            fits = any(
                not _value_problems(value, option, where=where, depth=depth + 1)
                for option in options
            )
            return [] if fits else [f"{where} has a value of none of the allowed kinds"]
    expected = schema.get("type")
    if expected and not _is_of_type(value, expected):
        return [f"{where} must be of type {_type_text(expected)}, not {type(value).__name__}"]
    if (allowed := schema.get("enum")) is not None and value not in allowed:
        return [f"{where} must be one of {', '.join(map(repr, allowed))}"]
    if isinstance(value, Mapping):
        return _object_problems(value, schema, where=f"{where}.", depth=depth)
    if isinstance(value, list | tuple) and "items" in schema:
        return [
            problem
            for number, item in enumerate(value)
            for problem in _value_problems(
                item, schema["items"], where=f"{where}[{number}]", depth=depth + 1
            )
        ]
    return []


def _is_of_type(value: Any, expected: str | Sequence[str]) -> bool:
    names = [expected] if isinstance(expected, str) else expected
    for name in names:
        kinds = _JSON_TYPES.get(name)
        if kinds is None:
            return True
        # A Python bool is an int, a JSON boolean is not a number.
        if isinstance(value, bool):
            if name == "boolean":
                return True
        elif isinstance(value, kinds) or (
            name == "integer" and isinstance(value, float) and value.is_integer()
        ):
            return True
    return False


def _type_text(expected: str | Sequence[str]) -> str:
    return expected if isinstance(expected, str) else " or ".join(expected)
