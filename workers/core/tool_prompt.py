"""The description of tools in a system prompt, for models without native tool calls.

Used by `create_system_prompt` of the agents. Must not: know a particular tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workers.core.tool_schemas import OpenAIFunctionToolSchema


def tools_text(schemas: Iterable[OpenAIFunctionToolSchema]) -> str:
    """Return one entry per tool: its call, its purpose, and the meaning of its parameters."""
    return "\n".join(_tool_text(schema) for schema in schemas)


def _tool_text(schema: OpenAIFunctionToolSchema) -> str:
    function = schema.function
    properties, required = function.parameters.properties, function.parameters.required
    call = ", ".join(
        f"{name}{'' if name in required else '?'}: {_kind_text(parameter)}"
        for name, parameter in properties.items()
    )
    lines = [f"- {function.name}({call}): {function.description}".rstrip(": ")]
    lines += [
        f"    {name}: {parameter['description']}"
        for name, parameter in properties.items()
        if isinstance(parameter, Mapping) and parameter.get("description")
    ]
    return "\n".join(lines)


def _kind_text(parameter: Any) -> str:
    if not isinstance(parameter, Mapping):
        return "any"
    if allowed := parameter.get("enum"):
        return " | ".join(map(repr, allowed))
    kind = parameter.get("type", "any")
    if kind == "array" and "items" in parameter:
        return f"list of {_kind_text(parameter['items'])}"
    return kind if isinstance(kind, str) else " | ".join(kind)
