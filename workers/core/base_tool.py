"""The two classes a tool derives from.

`BaseAgenticTool` for tools that bring their own schema and state; `SimpleAgenticTool` for one
method. One tool object serves many trajectories at once: the state of a trajectory is kept
under its instance id. A failure that the model can learn from is a `ToolResult` with success=False;
callers survive an exception, too.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from workers.core.options import Options
from workers.core.sync_call import call_sync_or_async
from workers.core.tool_schemas import (
    OpenAIFunctionToolSchema,
    ToolResult,
    as_tool_result,
    create_openai_tool_schema,
    parameter_problems,
)


class BaseAgenticTool(ABC):
    """A tool with an OpenAI schema, optional per-trajectory state and an optional reward.

    Args:
        config: The tool's settings.
        tool_schema: Its schema; or override `get_openai_tool_schema`.
    """

    #: The settings with their types. A class without `options` of its own takes any setting.
    options: ClassVar[Options]
    #: `recorded`: a later attempt of a rollout gets the result of an equal call from the journal
    #: instead of a second run. For paid or rate-limited lookups, and not for tools with a state.
    replay: Literal["again", "recorded"] = "again"

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: OpenAIFunctionToolSchema | None = None,
    ) -> None:
        self.config: dict[str, Any] = dict(config or {})
        self.tool_schema = tool_schema
        self._instances: dict[str, dict[str, Any]] = {}

    @property
    def name(self) -> str:
        """The name in the schema."""
        return self.get_openai_tool_schema().function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema that the model is shown."""
        if self.tool_schema is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no schema: pass tool_schema to its constructor "
                "or override get_openai_tool_schema"
            )
        return self.tool_schema

    async def create_instance(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Return the id of a new state, which `execute_tool` begins and `release_instance` ends."""
        return instance_id or uuid.uuid4().hex

    @abstractmethod
    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Do the work for one trajectory, whose state is empty at its first call."""

    async def release_instance(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory's state; an unknown id is no error."""
        self._instances.pop(instance_id, None)

    def instance_state(self, instance_id: str) -> dict[str, Any]:
        """Return the mutable state of a trajectory, empty at first."""
        return self._instances.setdefault(instance_id, {})

    def parameter_problems(self, parameters: Mapping[str, Any]) -> list[str]:
        """Return one sentence per parameter that does not fit the schema."""
        return parameter_problems(parameters, self.get_openai_tool_schema())


class SimpleAgenticTool(BaseAgenticTool):
    """A tool that is one method: override `simple_execute`, sync (runs in a thread) or async.

    Args:
        name: Name by which the model calls the tool.
        description: Purpose of the tool, for the model.
        parameters: Parameter name to its JSON Schema.
        required: Names that must be given.
        config: The tool's settings.
    """

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        required: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        schema = create_openai_tool_schema(name, description, parameters, required)
        super().__init__(config, schema)

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Check the parameters, run `simple_execute`, and wrap the returned value."""
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        return as_tool_result(await call_sync_or_async(self.simple_execute, parameters))

    @abstractmethod
    def simple_execute(self, parameters: dict[str, Any]) -> Any:
        """Return a `ToolResult`, or any value as the result of a success."""
