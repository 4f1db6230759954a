"""The `tool` agent: several tool calls in one reply, native or as `TOOL_CALL: name(k=v)`.

Used by name through the registry. Must not: run more calls of one reply than allowed. Further calls
get the reason as their result, since the API requires a result for every native call.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from workers.agents.tool_calling_agent import ToolCallingAgent
from workers.core.options import Options
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep


class ToolAgent(ToolCallingAgent):
    """Solves a task by tool calls; a reply without a call is the answer.

    Args:
        *args: As `BaseAgent`.
        allow_multiple_tool_calls: Whether one reply may make several calls.
        require_tool_usage: Whether an answer counts only after a tool was used.
        max_tool_calls_per_step: Most calls of one reply that are run, concurrently.
        native_tools: As `ToolCallingAgent`; here True by default.
        **kwargs: As `ToolCallingAgent`.
    """

    options: ClassVar[Options] = {}
    unlabelled_is_answer = True

    def __init__(
        self,
        *args: Any,
        allow_multiple_tool_calls: bool = True,
        require_tool_usage: bool = False,
        max_tool_calls_per_step: int = 3,
        native_tools: bool = True,
        **kwargs: Any,
    ) -> None:
        self.allow_multiple_tool_calls = allow_multiple_tool_calls
        self.require_tool_usage = require_tool_usage
        self.max_tool_calls_per_step = max_tool_calls_per_step if allow_multiple_tool_calls else 1
        super().__init__(*args, native_tools=native_tools, **kwargs)

    def create_system_prompt(self) -> str:
        """Return the instructions, with the tools themselves only in text mode."""
        most = self.max_tool_calls_per_step
        several = f"at most {most} calls in one reply" if most > 1 else "one call in one reply"
        must = " Use at least one tool before you answer." if self.require_tool_usage else ""
        ending = f"Make {several}.{must} When you are done, write only the result."
        if self.native_tools or not self.tools:
            return f"Solve the task by calling tools. {ending}"
        return (
            "Solve the task with these tools:\n"
            f"{self.tools_text()}\n\n"
            "To call one, write a line\n"
            "TOOL_CALL: tool_name(parameter='text', other=1)\n"
            f"{ending}"
        )

    async def act_on(self, steps: list[TrajectoryStep], trajectory: Trajectory) -> bool:
        """Append the reply and run its calls concurrently; the results keep the calls' order."""
        calls = [step for step in steps if step.step_type is StepType.ACTION]
        for step in steps:
            is_answer = step.step_type is StepType.FINAL_ANSWER
            if is_answer and self.require_tool_usage and not (calls or _has_used_tools(trajectory)):
                step.step_type = StepType.THOUGHT
            trajectory.add_step(step)
        if not calls:
            return steps[-1].step_type is StepType.FINAL_ANSWER
        problems = [self.problem_of(number, calls, trajectory) for number in range(len(calls))]
        runnable = [number for number, problem in enumerate(problems) if problem is None]
        left = self.calls_left(trajectory)
        is_cut = len(runnable) > left
        if is_cut:
            end = runnable[int(left)]
            calls, problems = calls[:end], problems[:end]
        results = [
            self.result_of(call, problem, trajectory)
            for call, problem in zip(calls, problems, strict=True)
        ]
        for result in await asyncio.gather(*results):
            if not self.append_result(result, trajectory):
                return bool(runnable)
        if is_cut:
            trajectory.metadata["stop_reason"] = "max_tool_calls"
        return bool(runnable)

    def refusal(
        self, number: int, steps: list[TrajectoryStep], trajectory: Trajectory
    ) -> str | None:
        """Refuse the calls beyond the most that one reply may make."""
        if number < self.max_tool_calls_per_step:
            return None
        return (
            f"the call was not run: at most {self.max_tool_calls_per_step} per reply; "
            "make it again in the next one if it is still needed"
        )

    def reminder(self) -> str:
        """Return the message after a reply that is neither a call nor an answer that counts."""
        if self.require_tool_usage:
            return "Use one of the tools before you answer."
        return "Call a tool, or write the result of the task."


def _has_used_tools(trajectory: Trajectory) -> bool:
    return bool(trajectory.metadata.get("tools"))
