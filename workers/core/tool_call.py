"""Run one call of a tool of any kind, and convert every failure to a `ToolResult`.

A tool has `execute_tool(instance_id, parameters)` (ours), `execute(instance_id, parameters)` with
`create` and `release` (verl's), or `execute(**args)`; sync methods run in a thread. Called by
agents. Must not: raise a tool's exception, except cancellation and `SandboxFailure`, which is a
failure of the infrastructure.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from workers.core.function_tool import FunctionTool, schema_of_execute
from workers.core.sync_call import call_sync_or_async
from workers.core.tool_schemas import OpenAIFunctionToolSchema, ToolResult, as_tool_result
from workers.sandbox.base import SandboxFailure

logger = logging.getLogger(__name__)


class ResultRecorder(Protocol):
    """Keeps results of tools for a later attempt of the same rollout."""

    def find_result(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the result that an earlier attempt recorded for an equal call, and remove it."""
        ...

    def note_result(
        self, tool: str, arguments: Mapping[str, Any], result: Mapping[str, Any], elapsed_s: float
    ) -> None:
        """Note a result of this attempt."""
        ...


_recorder: ContextVar[ResultRecorder | None] = ContextVar("result_recorder", default=None)


@contextmanager
def recording_results(recorder: ResultRecorder | None) -> Iterator[None]:
    """Let tools with `replay = "recorded"` that are called inside the block use this recorder."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


async def invoke_tool_once(
    name: str, tool: Any, instance_id: str, parameters: dict[str, Any], *, timeout_s: float | None
) -> ToolResult:
    """Run a tool, or return the result that an earlier attempt recorded for an equal call.

    Only tools with `replay = "recorded"` are recorded, and only their successful results.

    Raises:
        SandboxFailure: As in `invoke_tool`.
    """
    recorder = _recorder.get() if getattr(tool, "replay", None) == "recorded" else None
    if recorder is None:
        return await invoke_tool(tool, instance_id, parameters, timeout_s=timeout_s)
    if (found := recorder.find_result(name, parameters)) is not None:
        return ToolResult.model_validate(found)
    started = time.perf_counter()
    result = await invoke_tool(tool, instance_id, parameters, timeout_s=timeout_s)
    if result.success:
        # The recorded text is the one that the model saw.
        values = {**result.model_dump(), "shown": result.to_text()}
        recorder.note_result(name, parameters, values, time.perf_counter() - started)
    return result


async def invoke_tool(
    tool: Any,
    instance_id: str,
    parameters: dict[str, Any],
    *,
    timeout_s: float | None = None,
) -> ToolResult:
    """Run a tool once for one trajectory; its exception or time-out is a result with the error.

    After a time-out a sync tool continues in its thread, because a thread cannot be stopped.

    Raises:
        SandboxFailure: The tool's sandbox would not start or died.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _execute(tool, instance_id, parameters)
    except SandboxFailure:
        raise
    except TimeoutError as error:
        text = str(error) or "the tool did not finish in time"
        text += f" (limit {timeout_s:g} s)" if timeout_s else ""
        return ToolResult(success=False, error=text, metrics={"timed_out": True})
    except Exception as error:  # a tool is foreign code: the model gets any failure as a result
        logger.debug("tool %s raised", type(tool).__name__, exc_info=True)
        text = str(error)
        kind = type(error).__name__
        return ToolResult(success=False, error=f"{kind}: {text}" if text else kind)


async def release_tool(tool: Any, instance_id: str) -> None:
    """Release a tool's state for one trajectory; its exception is logged."""
    release = getattr(tool, "release_instance", None)
    if release is None and _is_verl_tool(tool):
        release = tool.release
    if release is None:
        return
    try:
        await call_sync_or_async(release, instance_id)
    except Exception:  # a failed release must not fail the finished trajectory
        logger.warning("tool %s could not release its state", type(tool).__name__, exc_info=True)


def checked_tool(name: str, tool: Any) -> Any:
    """Return the tool itself, or a plain function wrapped as a tool.

    Raises:
        TypeError: The object cannot be a tool.
    """
    is_class = isinstance(tool, type)
    if not is_class and (hasattr(tool, "execute_tool") or hasattr(tool, "execute")):
        return tool
    if is_class or not callable(tool):
        raise TypeError(
            f"tool {name!r} is {tool!r}; expected an object with execute_tool(instance_id, "
            "parameters) or execute(**args), or a function"
        )
    return FunctionTool(tool, name)


def tool_schema(name: str, tool: Any) -> OpenAIFunctionToolSchema:
    """Return the tool's schema for the model, with the agent's name for the tool."""
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


def _is_verl_tool(tool: Any) -> bool:
    """Say whether a tool has the methods of a verl tool and not ours."""
    return not hasattr(tool, "execute_tool") and all(
        callable(getattr(tool, method, None)) for method in ("create", "execute", "release")
    )


async def _execute(tool: Any, instance_id: str, parameters: dict[str, Any]) -> ToolResult:
    if execute_tool := getattr(tool, "execute_tool", None):
        return as_tool_result(await call_sync_or_async(execute_tool, instance_id, parameters))
    if _is_verl_tool(tool):
        return await _execute_verl(tool, instance_id, parameters)
    _check_arguments(tool.execute, parameters)
    return as_tool_result(await call_sync_or_async(tool.execute, **parameters))


async def _execute_verl(tool: Any, instance_id: str, parameters: dict[str, Any]) -> ToolResult:
    """Run a verl tool: `create` may be repeated, `execute` returns (response, reward, metrics)."""
    await call_sync_or_async(tool.create, instance_id)
    returned = await call_sync_or_async(tool.execute, instance_id, parameters)
    parts: Sequence[Any] = returned if isinstance(returned, tuple) else (returned,)
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
