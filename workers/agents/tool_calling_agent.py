"""The loop of agents with tools: call the model, run its tool calls, send it the results.

The react, tool and coding agents derive from it. They differ in their instructions and in the
calls that they refuse. Must not: keep state of a trajectory on the agent, or catch an exception of
the model's client.
"""

from __future__ import annotations

import math
from typing import Any

from workers.core.base_agent import BaseAgent
from workers.core.call_formats import AUTO, TOOL_FORMATS
from workers.core.conversation import begin_trajectory
from workers.core.interaction import interacting, respond_to_answer
from workers.core.reply_format import ReplyFormat
from workers.core.tool_schemas import ToolResult
from workers.core.trajectory import LOST_CALLS, StepType, Trajectory, TrajectoryStep


class ToolCallingAgent(BaseAgent):
    """An agent that calls tools in steps.

    Args:
        *args: As `BaseAgent`.
        native_tools: Whether tools are offered to the model in the OpenAI format; else the system
            prompt describes them. Replies in either format are read.
        max_consecutive_thoughts: The trajectory ends with `parse_error` after this many replies in
            a row with neither a usable tool call nor an answer.
        tool_format: The model family's format of calls that a server leaves in the text: `auto`
            tries all, or one of `call_formats.TOOL_FORMATS`.
        **kwargs: As `BaseAgent`.
    """

    #: Whether a reply without labels is the answer, also where tools are described in text.
    unlabelled_is_answer = False

    def __init__(
        self,
        *args: Any,
        native_tools: bool = False,
        max_consecutive_thoughts: int = 3,
        tool_format: str = AUTO,
        **kwargs: Any,
    ) -> None:
        if tool_format not in TOOL_FORMATS:
            raise ValueError(
                f"tool_format is {tool_format!r}; it must be one of {', '.join(TOOL_FORMATS)}"
            )
        self.tool_format = tool_format
        self.native_tools = native_tools
        self.max_consecutive_thoughts = max_consecutive_thoughts
        super().__init__(*args, **kwargs)

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Work on one prompt, see `BaseAgent.run_trajectory`."""
        trajectory = begin_trajectory(prompt, request_id, kwargs.get("trajectory"))
        async with interacting(self.interactions, trajectory):
            try:
                await self.work(trajectory, llm_generate_func)
            finally:
                await self.release_tools(trajectory)
        self.finalize_trajectory(trajectory)
        return trajectory

    async def work(self, trajectory: Trajectory, llm_generate_func: Any) -> None:
        """Call the model and act on its replies until a stop reason."""
        unusable_replies = 0
        while self.should_continue(trajectory):
            steps = await self.generate(llm_generate_func, trajectory, **self.offered_tools())
            is_usable = await self.act_on(steps, trajectory)
            if steps[0].metadata.get("finish_reason") == "length" and not _has_call(steps):
                trajectory.metadata["stop_reason"] = "max_tokens"
            elif is_usable:
                unusable_replies = 0
                if self.interactions and trajectory.steps[-1].step_type is StepType.FINAL_ANSWER:
                    await respond_to_answer(self.interactions, trajectory)
            else:
                unusable_replies += 1
                self.handle_unusable(steps, unusable_replies, trajectory)

    def offered_tools(self) -> dict[str, Any]:
        """Return the arguments that offer the tools to the model natively; none in text mode."""
        if not self.native_tools or not self.tools:
            return {}
        return {"tools": [schema.to_openai() for schema in self.tool_schemas().values()]}

    def reply_format(self) -> ReplyFormat:
        """Return the rules for replies: with native tools, plain text is an answer."""
        is_answer = self.native_tools or self.unlabelled_is_answer
        return ReplyFormat(
            unlabelled=StepType.FINAL_ANSWER if is_answer else StepType.THOUGHT,
            tools=self.tool_schemas(),
            tool_format=self.tool_format,
            native_tools=self.native_tools,
        )

    async def act_on(self, steps: list[TrajectoryStep], trajectory: Trajectory) -> bool:
        """Append a reply's steps in order and run each call; return whether a step was usable."""
        is_usable = False
        for number, step in enumerate(steps):
            trajectory.add_step(step)
            if step.step_type is StepType.FINAL_ANSWER:
                return True
            if step.step_type is StepType.ACTION:
                problem = self.problem_of(number, steps, trajectory)
                is_usable |= problem is None
                if problem is None and not self.calls_left(trajectory):
                    trajectory.metadata["stop_reason"] = "max_tool_calls"
                    return True
                result = await self.result_of(step, problem, trajectory)
                if not self.append_result(result, trajectory):
                    return True
        return is_usable

    def problem_of(
        self, number: int, steps: list[TrajectoryStep], trajectory: Trajectory
    ) -> str | None:
        """Return the reason why the call at this index of the reply is not run; None runs it."""
        return steps[number].metadata.get("parse_error") or self.refusal(number, steps, trajectory)

    def refusal(
        self, number: int, steps: list[TrajectoryStep], trajectory: Trajectory
    ) -> str | None:
        """Return the reason why a well-formed call is not run; None runs it."""
        return None

    async def result_of(
        self, step: TrajectoryStep, problem: str | None, trajectory: Trajectory
    ) -> TrajectoryStep:
        """Return the result step of a call; the result of a refused call is its problem."""
        call_id = step.metadata.get("tool_call_id")
        if problem is not None:
            result = ToolResult(success=False, error=problem)
            return self.result_step(step.tool_name, step.tool_args, result, call_id)
        return await self.execute_tool_call(
            step.tool_name or "", step.tool_args, trajectory, call_id=call_id
        )

    def append_result(self, result: TrajectoryStep, trajectory: Trajectory) -> bool:
        """Append a tool's result; False if the tool ended the trajectory."""
        trajectory.add_step(result)
        if not result.metadata.get("stop"):
            return True
        answer = result.metadata.get("metrics", {}).get("final_answer")
        if answer is None:
            trajectory.metadata["stop_reason"] = "tool_stopped"
        else:
            # No message: the conversation has the answer already, as an argument of the call.
            final = TrajectoryStep(StepType.FINAL_ANSWER, str(answer), {"chat_message": None})
            trajectory.add_step(final)
        return False

    def calls_left(self, trajectory: Trajectory) -> float:
        """Return how many more calls `max_tool_calls` allows; infinite without it."""
        if self.max_tool_calls is None:
            return math.inf
        counts = trajectory.metadata.get("tools", {}).values()
        return max(0, self.max_tool_calls - sum(count["calls"] for count in counts))

    def handle_unusable(
        self, steps: list[TrajectoryStep], unusable_replies: int, trajectory: Trajectory
    ) -> None:
        """End the trajectory after too many unusable replies, else send the model a reminder."""
        lost = steps[-1].metadata.get("lost_call")
        if lost is not None:
            count = trajectory.metadata[LOST_CALLS] = trajectory.metadata.get(LOST_CALLS, 0) + 1
            if count == 1:
                trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, self.correction(lost)))
                return
        if lost is not None or unusable_replies >= self.max_consecutive_thoughts:
            trajectory.metadata["stop_reason"] = "parse_error"
        elif not any(step.step_type is StepType.ACTION for step in steps):
            # The result of an unusable call names its problem already.
            trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, self.reminder()))

    def correction(self, lost: str) -> str:
        """Return the message after a reply that looks like a call and cannot be read as one."""
        how = (
            "in the format of your tool-call template, or as one JSON object and nothing else"
            if self.native_tools
            else "as 'Action: tool_name(parameter=value)'"
        )
        return (
            f"Your reply was not run and does not count as an answer: {lost}. Write a call {how}. "
            "Write an answer after 'Final Answer:'."
        )

    def reminder(self) -> str:
        """Return the message after a reply with neither a call nor an answer."""
        if self.native_tools:
            return "Call a tool, or write your result after 'Final Answer:'."
        if not self.tools:
            return "Write your result after 'Final Answer:'."
        return (
            "Go on with one of these lines: 'Action: tool_name(parameter=value)' or "
            "'Final Answer: your result'."
        )


def _has_call(steps: list[TrajectoryStep]) -> bool:
    return any(
        step.step_type is StepType.ACTION and "parse_error" not in step.metadata for step in steps
    )
