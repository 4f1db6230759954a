"""The `react` agent: reason, act, observe, in text (`Thought:`, `Action:`) or native tool calls.

Used by name through the registry. Must not: run an action that the model did not write.
"""

from __future__ import annotations

from typing import Any, ClassVar

from workers.agents.tool_calling_agent import ToolCallingAgent
from workers.core.options import Options
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

_REFLECTION = "Before you go on, think about why this failed and what to do differently."


class ReActAgent(ToolCallingAgent):
    """Reasoning and acting in turns.

    Args:
        *args: As `BaseAgent`.
        require_thought_before_action: Whether an action needs a thought before it in its reply; an
            action without a thought is not run, and its result says so.
        enable_self_reflection: Whether the model is asked to reflect after a failed tool call.
        **kwargs: As `ToolCallingAgent`.
    """

    options: ClassVar[Options] = {}

    def __init__(
        self,
        *args: Any,
        require_thought_before_action: bool = False,
        enable_self_reflection: bool = False,
        **kwargs: Any,
    ) -> None:
        self.require_thought_before_action = require_thought_before_action
        self.enable_self_reflection = enable_self_reflection
        super().__init__(*args, **kwargs)

    def create_system_prompt(self) -> str:
        """Return the instructions for the text protocol, or the shorter ones for native calls."""
        if self.native_tools or not self.tools:
            use = " Call the tools where they help." if self.tools else ""
            return f"Think step by step.{use} Write your result after 'Final Answer:'."
        return (
            "Solve the task in turns of thinking and acting. You have these tools:\n"
            f"{self.tools_text()}\n\n"
            "In each turn write\n"
            "Thought: what you know and what to do next\n"
            "Action: tool_name(parameter='text', other=1)\n"
            "and stop there. You are then told 'Observation:' and the tool's result. When you know "
            "the result of the task, write\n"
            "Thought: why it is the result\n"
            "Final Answer: the result"
        )

    def refusal(
        self, number: int, steps: list[TrajectoryStep], trajectory: Trajectory
    ) -> str | None:
        """Refuse an action without a thought before it, if thoughts are required."""
        if not self.require_thought_before_action:
            return None
        has_thought = any(step.step_type is StepType.THOUGHT for step in steps[:number])
        if has_thought or "reasoning" in steps[0].metadata:
            return None
        return "the action was not run: write a line 'Thought: ...' before each action"

    def append_result(self, result: TrajectoryStep, trajectory: Trajectory) -> bool:
        """Append a tool's result; after a failure it asks the model to reflect."""
        message = result.metadata["chat_message"]
        if self.enable_self_reflection and not result.metadata["execution_successful"]:
            message["content"] += f"\n{_REFLECTION}"
        return super().append_result(result, trajectory)
