"""The `finish` tool: the model gives its answer and ends the trajectory.

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
    """Ends the trajectory; its stop reason is `answered`, without an answer `tool_stopped`."""

    options: ClassVar[Options] = {}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, _SCHEMA)

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Return the answer as `metrics["final_answer"]`, which agents record as final answer."""
        answer = parameters.get("answer")
        if answer is not None and not isinstance(answer, str):
            parameters = {**parameters, "answer": str(answer)}
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        metrics: dict[str, Any] = {"status": parameters.get("status", "success")}
        if answer is not None:
            metrics["final_answer"] = parameters["answer"]
        return ToolResult(success=True, result="The task is finished.", metrics=metrics, stop=True)
