"""Run one call of anything that can be a tool, and turn every failure into a `ToolResult`.

A tool has `execute_tool(instance_id, parameters)` (ours), `execute(instance_id, parameters)` beside
`create` and `release` (verl's), or `execute(**args)`; sync ones run in a thread. Called by agents
and the tool registry. Must not: let a tool's exception through, but for two: cancellation, and a
sandbox that fails, which is an infrastructure failure and no result of the tool.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.core.function_tool import as_tool, schema_of_execute
from workers.core.sync_call import call_anyhow
from workers.core.tool_schemas import OpenAIFunctionToolSchema, ToolResult, as_tool_result
from workers.sandbox.base import SandboxFailure

logger = logging.getLogger(__name__)


async def invoke_tool(
    tool: Any,
    instance_id: str,
    parameters: dict[str, Any],
    *,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> ToolResult:
    """Run a tool once for one trajectory; its exception or time-out is a result with the error.

    A sync tool that runs out of time is left behind in its thread: nothing can stop it.

    Raises:
        SandboxFailure: The sandbox the tool works in would not start or died.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _execute(tool, instance_id, parameters, kwargs)
    except SandboxFailure:
        raise
    except TimeoutError as error:
        text = str(error) or "the tool did not finish in time"
        text += f" (limit {timeout_s:g} s)" if timeout_s else ""
        return ToolResult(success=False, error=text, metrics={"timed_out": True})
    except Exception as error:  # a tool is foreign code: any failure is told to the model
        logger.debug("tool %s raised", type(tool).__name__, exc_info=True)
        text = str(error)
        kind = type(error).__name__
        return ToolResult(success=False, error=f"{kind}: {text}" if text else kind)


async def release_tool(tool: Any, instance_id: str) -> None:
    """End a tool's state for one trajectory, if it keeps any; its exception is logged."""
    release = getattr(tool, "release_instance", None)
    if release is None and is_verl_tool(tool):
        release = tool.release
    if release is None:
        return
    try:
        await call_anyhow(release, instance_id)
    except Exception:  # the trajectory is over: a failing clean-up must not undo it
        logger.warning("tool %s could not release its state", type(tool).__name__, exc_info=True)


def checked_tool(name: str, tool: Any) -> Any:
    """Return what can be called as a tool: the object itself, or a plain function wrapped.

    Raises:
        TypeError: It is none of the things a tool can be.
    """
    is_class = isinstance(tool, type)
    if not is_class and (hasattr(tool, "execute_tool") or hasattr(tool, "execute")):
        return tool
    if is_class or not callable(tool):
        raise TypeError(
            f"tool {name!r} is {tool!r}; expected an object with execute_tool(instance_id, "
            "parameters) or execute(**args), or a function"
        )
    return as_tool(tool, name)


def tool_schema(name: str, tool: Any) -> OpenAIFunctionToolSchema:
    """Return the schema the model is shown, under the name the agent knows the tool by."""
    if get_schema := getattr(tool, "get_openai_tool_schema", None):
        schema = get_schema()
        if not isinstance(schema, OpenAIFunctionToolSchema):
            dumped = schema if isinstance(schema, Mapping) else schema.model_dump(exclude_none=True)
            schema = OpenAIFunctionToolSchema.model_validate(dumped)
    else:
        schema = schema_of_execute(tool, name)
    if schema.function.name != name:
        schema = schema.model_copy(
            update={"function": schema.function.model_copy(update={"name": name})}
        )
    return schema


def is_verl_tool(tool: Any) -> bool:
    """Say whether it has the methods of a verl tool and not ours."""
    return not hasattr(tool, "execute_tool") and all(
        callable(getattr(tool, method, None)) for method in ("create", "execute", "release")
    )


async def _execute(
    tool: Any, instance_id: str, parameters: dict[str, Any], kwargs: Mapping[str, Any]
) -> ToolResult:
    if execute_tool := getattr(tool, "execute_tool", None):
        return as_tool_result(await call_anyhow(execute_tool, instance_id, parameters, **kwargs))
    if is_verl_tool(tool):
        return await _execute_verl(tool, instance_id, parameters)
    _check_arguments(tool.execute, parameters)
    return as_tool_result(await call_anyhow(tool.execute, **parameters))


async def _execute_verl(tool: Any, instance_id: str, parameters: dict[str, Any]) -> ToolResult:
    """Run a verl tool: create is repeatable, execute gives (response, reward, metrics)."""
    await call_anyhow(tool.create, instance_id)
    given = await call_anyhow(tool.execute, instance_id, parameters)
    parts: Sequence[Any] = given if isinstance(given, tuple) else (given,)
    response, reward, metrics = (*parts, None, None)[:3]
    text = getattr(response, "text", response)
    return ToolResult(
        success=True, result=text, reward_score=float(reward or 0.0), metrics=dict(metrics or {})
    )


def _check_arguments(execute: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(execute)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**parameters)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        raise TypeError(f"{error}; the tool's parameters: {names}") from None
