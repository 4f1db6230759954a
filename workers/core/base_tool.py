"""The two classes a tool derives from.

`BaseAgenticTool` for tools that bring their own schema and state; `SimpleAgenticTool` for one
method. One tool object serves many trajectories at once: what belongs to a trajectory is kept
under its instance id. Must not: raise for a failure the model can learn from (`ToolResult` with
success=False), though an exception is survived by every caller.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from workers.core.options import Options
from workers.core.sync_call import call_anyhow
from workers.core.tool_schemas import (
    OpenAIFunctionToolSchema,
    ToolResult,
    create_openai_tool_schema,
    parameter_problems,
)


class BaseAgenticTool(ABC):
    """A tool with an OpenAI schema, optional per-trajectory state and an optional reward.

    Args:
        config: The tool's settings.
        tool_schema: Its schema; or override `get_openai_tool_schema`.
    """

    #: Its settings with their types. A class that does not state its own takes any.
    options: ClassVar[Options]

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
        """Return the schema the model is shown."""
        if self.tool_schema is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no schema: pass tool_schema to its constructor "
                "or override get_openai_tool_schema"
            )
        return self.tool_schema

    @abstractmethod
    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Do the work for one trajectory.

        An instance id nobody created is valid: its state begins empty.
        """

    async def create_instance(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin the state of one trajectory and return its id (a new one when None)."""
        instance_id = instance_id or uuid.uuid4().hex
        self._instances.setdefault(instance_id, {})
        return instance_id

    async def calculate_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's own reward for the trajectory so far; 0.0 where it has none."""
        return 0.0

    async def release_instance(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory's state; an unknown id is no error."""
        self._instances.pop(instance_id, None)

    def instance_state(self, instance_id: str) -> dict[str, Any]:
        """Return the mutable state of a trajectory, empty at first."""
        return self._instances.setdefault(instance_id, {})

    def validate_parameters(self, parameters: Mapping[str, Any]) -> bool:
        """Say whether the parameters fit the schema."""
        return not self.parameter_problems(parameters)

    def parameter_problems(self, parameters: Mapping[str, Any]) -> list[str]:
        """Return one sentence per parameter that does not fit the schema."""
        return parameter_problems(parameters, self.get_openai_tool_schema())

    def get_tool_info(self) -> dict[str, Any]:
        """Return name, description, parameters, configuration and the number of live instances."""
        function = self.get_openai_tool_schema().function
        return {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters.model_dump(),
            "tool_class": type(self).__name__,
            "config": dict(self.config),
            "active_instances": len(self._instances),
        }


class SimpleAgenticTool(BaseAgenticTool):
    """A tool that is one method: override `simple_execute`, sync (runs in a thread) or async.

    Args:
        name: Name by which the model calls the tool.
        description: What it does, for the model.
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
        """Check the parameters, run `simple_execute`, and wrap what it returns."""
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        return as_tool_result(await call_anyhow(self.simple_execute, parameters))

    @abstractmethod
    def simple_execute(self, parameters: dict[str, Any]) -> Any:
        """Return a `ToolResult`, or any value as the result of a success."""


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
