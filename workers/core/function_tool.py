"""Plain typed functions as tools, and schemas for tools that have none.

pydantic makes the schema from the signature and checks the arguments. `tool_registry.tool`
registers a function by decorator. Must not: run a sync function in the event loop.
"""

from __future__ import annotations

import inspect
import re
import typing
import weakref
from collections.abc import Callable
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined
from typing_extensions import TypedDict  # pydantic refuses typing's below Python 3.12

from workers.core.base_tool import BaseAgenticTool
from workers.core.sync_call import call_sync_or_async
from workers.core.tool_schemas import (
    OpenAIFunctionToolSchema,
    ToolResult,
    as_tool_result,
    create_openai_tool_schema,
)

# Static type checkers do not know types made at run time.
_make_typed_dict = typing.cast(Any, TypedDict)
_ARGS_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ARG_LINE = re.compile(r"^\s{2,}\**(\w+)(?:\s*\([^)]{0,200}\))?:\s*(.+)$")
# pydantic takes about a millisecond for a signature, and agents are made often.
_execute_schemas: weakref.WeakKeyDictionary[type, OpenAIFunctionToolSchema] = (
    weakref.WeakKeyDictionary()
)


class FunctionTool(BaseAgenticTool):
    """A typed function as a tool.

    Args:
        function: Sync (runs in a thread) or async. The docstring describes the tool, its `Args:`
            section the parameters.
        name: Name for the model; the function's own when None.
        description: Text for the model; the docstring's first paragraph when None.
        replay: `again` or `recorded`, see `BaseAgenticTool.replay`.

    Raises:
        TypeError: The signature cannot be a tool's (positional-only, `*args`, unusable types).
        ValueError: There is no such `replay`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        description: str | None = None,
        replay: Literal["again", "recorded"] = "again",
    ) -> None:
        if replay not in ("again", "recorded"):
            raise ValueError(f'replay is {replay!r}; give "again" or "recorded"')
        self.replay = replay
        self.function = function
        self._arguments = arguments_adapter(function)
        name = name or str(getattr(function, "__name__", type(function).__name__))
        super().__init__(tool_schema=schema_of(function, self._arguments, name, description))

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Check and convert the arguments by the signature, call, wrap the result."""
        try:
            arguments: Any = self._arguments.validate_python(parameters)
        except ValidationError as error:
            return ToolResult(success=False, error=_problems_text(error))
        return as_tool_result(await call_sync_or_async(self.function, **arguments))


def schema_of_execute(tool: Any, name: str) -> OpenAIFunctionToolSchema:
    """Return a schema for a tool that only has `execute(**args)`, from its signature."""
    known = _execute_schemas.get(type(tool))
    if known is None or known.function.name != name:
        known = _execute_schemas[type(tool)] = _schema_of_execute(tool, name)
    return known


def arguments_adapter(function: Callable[..., Any]) -> TypeAdapter[Any]:
    """Return the pydantic type of the function's keyword arguments.

    Raises:
        TypeError: A parameter cannot be given by name, or its annotation is not a usable type.
    """
    label = getattr(function, "__qualname__", repr(function))
    descriptions = _argument_descriptions(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    extra: typing.Literal["forbid", "allow"] = "forbid"
    hints = _hints(function, label)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"{label} cannot be a tool: parameter {parameter.name!r} cannot be given by name; "
                "use ordinary parameters"
            )
        else:
            fields[parameter.name] = parameter, hints.get(parameter.name, Any)
    try:
        annotated = {
            name: _field(parameter, annotation, descriptions)
            for name, (parameter, annotation) in fields.items()
        }
        arguments = _make_typed_dict("arguments", annotated)
        arguments.__pydantic_config__ = ConfigDict(extra=extra)
        adapter = TypeAdapter(arguments)
        adapter.json_schema()
    except Exception as error:  # pydantic has many errors for types it cannot describe
        raise TypeError(f"{label} cannot be a tool: {error}") from error
    return adapter


def schema_of(
    function: Callable[..., Any],
    arguments: TypeAdapter[Any],
    name: str,
    description: str | None,
) -> OpenAIFunctionToolSchema:
    """Return the OpenAI schema of a function whose arguments type is known."""
    schema = {key: value for key, value in arguments.json_schema().items() if key != "title"}
    for parameter in schema.get("properties", {}).values():
        parameter.pop("title", None)
    if description is None:
        description = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return create_openai_tool_schema(name, " ".join(description.split()), schema)


def _schema_of_execute(tool: Any, name: str) -> OpenAIFunctionToolSchema:
    description = inspect.getdoc(type(tool)) if type(tool).__doc__ else None
    try:
        adapter = arguments_adapter(tool.execute)
    except (TypeError, ValueError):  # no usable signature: any arguments are passed to the tool
        return create_openai_tool_schema(
            name, description or "", {"type": "object", "additionalProperties": True}
        )
    return schema_of(tool.execute, adapter, name, description)


def _hints(function: Callable[..., Any], label: str) -> dict[str, Any]:
    target = function
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        target = getattr(function, "func", None) or type(function).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise TypeError(f"{label} cannot be a tool: an annotation is unknown: {error}") from error


def _field(parameter: inspect.Parameter, annotation: Any, descriptions: dict[str, str]) -> Any:
    has_default = parameter.default is not parameter.empty
    shown_default = parameter.default if has_default else PydanticUndefined
    options: dict[str, Any] = {"description": descriptions.get(parameter.name)}
    if isinstance(shown_default, str | int | float | bool):
        options["json_schema_extra"] = {"default": shown_default}
    field = typing.Annotated[annotation, Field(**options)]
    return NotRequired[field] if has_default else field


def _argument_descriptions(doc: str) -> dict[str, str]:
    section = _ARGS_SECTION.search(doc)
    if not section:
        return {}
    found: dict[str, str] = {}
    for line in doc[section.end() :].split("\n")[1:]:
        if line and not line.startswith(" "):
            break
        if match := _ARG_LINE.match(line):
            found[match.group(1)] = match.group(2).strip()
    return found


def _problems_text(error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"])
        problems.append(f"{where}: {item['msg']}" if where else item["msg"])
    return "the arguments do not fit: " + "; ".join(problems)
