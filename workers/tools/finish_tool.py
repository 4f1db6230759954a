"""The `finish` tool: the model hands over its answer and ends the trajectory.

Used by name through the tool registry. Must not: judge the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.core.base_tool import BaseAgenticTool
from workers.core.options import Options
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema

_SCHEMA = create_openai_tool_schema(
    "finish",
    "End the task: hand over the answer, or give up.",
    {
        "answer": {"type": "string", "description": "The result of the task."},
        "status": {
            "type": "string",
            "enum": ["success", "failure"],
            "description": "Whether the task was solved; 'success' when left out.",
        },
    },
)


class FinishTool(BaseAgenticTool):
    """Ends the trajectory: with an answer as answered, without one as stopped by a tool."""

    options: ClassVar[Options] = {}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, _SCHEMA)

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Take the answer; `metrics["final_answer"]` is what agents record as such."""
        answer = parameters.get("answer")
        if answer is not None and not isinstance(answer, str):
            parameters = {**parameters, "answer": str(answer)}
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        metrics: dict[str, Any] = {"status": parameters.get("status", "success")}
        if answer is not None:
            metrics["final_answer"] = parameters["answer"]
        return ToolResult(success=True, result="The task is finished.", metrics=metrics, stop=True)
