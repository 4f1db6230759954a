"""The abstract class that agents derive from: prompts, model calls, tool calls, stop reasons.

Subclassed by `workers/agents/*` and by users; run by `AgenticRollout` and the worker's executor.
One agent object serves many trajectories at once, so the state of a trajectory is kept in the
trajectory. Must not: catch an exception of the model's client.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from workers.core.conversation import content_chars
from workers.core.model_response import ModelResponse, as_model_response
from workers.core.options import Options, options_of, takes_any
from workers.core.reply_format import ReplyFormat
from workers.core.reply_parser import first_step_of, read_reply
from workers.core.sync_call import call_sync_or_async
from workers.core.tool_call import checked_tool, invoke_tool_once, release_tool, tool_schema
from workers.core.tool_prompt import tools_text
from workers.core.tool_schemas import OpenAIFunctionToolSchema, ToolResult, cut_middle
from workers.core.tools_config import create_tools
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep


class BaseAgent(ABC):
    """An agent: turns a prompt into a trajectory by calling a model and tools.

    Args:
        max_steps: A trajectory ends at this many steps of any kind. The steps of one reply are
            recorded together, so the last reply may exceed the limit by a step or two.
        max_tokens_per_step: Most tokens sampled by one model call.
        temperature: Sampling temperature.
        tools_config: Tool names, or name to settings; the tool registry makes the tools.
        **kwargs: Further options, kept in `config`. Every agent takes: `system_prompt` (text before
            the agent's own), `max_total_tokens` (most tokens sampled by all calls together),
            `max_tool_calls`, `tool_timeout_s` (600), `max_observation_chars` (20,000),
            `generate_kwargs` (passed to each model call, such as `stop`).
    """

    #: Options beside those of the signature, with their types. A class with `options` of its own,
    #: even empty ones, takes no others; a class without them takes any option.
    options: ClassVar[Options] = {
        "system_prompt": str | None,
        "max_total_tokens": int | None,
        "max_tool_calls": int | None,
        "tool_timeout_s": float | None,
        "max_observation_chars": int,
        "generate_kwargs": dict[str, Any],
    }

    #: Whether the agent itself rewards the finished work. A trajectory that was cut off then has no
    #: reward.
    judges_itself = False

    def __init__(
        self,
        max_steps: int = 10,
        max_tokens_per_step: int = 512,
        temperature: float = 0.7,
        tools_config: Mapping[str, Any] | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1")
        self.max_steps = max_steps
        self.max_tokens_per_step = max_tokens_per_step
        self.temperature = temperature
        self.tools_config = tools_config
        self.config: dict[str, Any] = kwargs
        self.max_total_tokens: int | None = kwargs.get("max_total_tokens")
        self.max_tool_calls: int | None = kwargs.get("max_tool_calls")
        self.tool_timeout_s: float | None = kwargs.get("tool_timeout_s", 600.0)
        self.max_observation_chars: int = kwargs.get("max_observation_chars", 20_000)
        self.tools: dict[str, Any] = {}
        self.interactions: dict[str, Any] = {}
        self.on_finalized: Callable[[Trajectory], None] | None = None
        self._schemas: dict[str, OpenAIFunctionToolSchema] = {}
        self._system_prompt: str | None = None
        if tools_config:
            self.set_tools(create_tools(tools_config))

    @classmethod
    def known_options(cls) -> Options | None:
        """Return every option with its type; None if a class with `**kwargs` takes any option."""
        if "options" not in vars(cls) and takes_any(cls.__init__):
            return None
        known: dict[str, Any] = {}
        for base in cls.__mro__:
            known = {**vars(base).get("options", {}), **known}
            if init := vars(base).get("__init__"):
                known = {**options_of(init), **known}
                if not takes_any(init):
                    break
        return known

    @abstractmethod
    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Work on one prompt until a stop reason; the model client's exceptions propagate.

        Args:
            prompt: "content" (text) or "messages" (a list), and other fields of the task.
            llm_generate_func: `(messages, max_tokens=, temperature=, **kw)`, sync or async; returns
                text, a dict with "content", or an object with `.text`.
            request_id: Unique name of this attempt; also the instance id of its tools.
            **kwargs: `trajectory`: the object to append to, so that the caller keeps the steps so
                far when the model's client raises.
        """

    def set_tools(self, tools: Mapping[str, Any]) -> None:
        """Use these tools by these names, and no others."""
        self.tools = {name: checked_tool(name, tool) for name, tool in tools.items()}
        self._schemas = {}
        self._system_prompt = None

    def set_interactions(self, interactions: Mapping[str, Any]) -> None:
        """Use these interactions: each may reply to a final answer, and the agent continues."""
        self.interactions = dict(interactions)

    def tool_schemas(self) -> dict[str, OpenAIFunctionToolSchema]:
        """Return the schemas of the agent's tools by name."""
        if len(self._schemas) != len(self.tools):
            self._schemas = {name: tool_schema(name, tool) for name, tool in self.tools.items()}
        return self._schemas

    def should_continue(self, trajectory: Trajectory) -> bool:
        """Say whether to call the model again: no answer yet, and no limit reached."""
        return not trajectory.is_completed and self.decide_stop(trajectory) is None

    def decide_stop(self, trajectory: Trajectory) -> str | None:
        """Return the stop reason of the trajectory; None if it continues."""
        if (reason := trajectory.metadata.get("stop_reason")) is not None:
            return reason
        if any(step.step_type is StepType.FINAL_ANSWER for step in reversed(trajectory.steps)):
            return "answered"
        if self.tokens_left(trajectory) == 0:
            return "max_tokens"
        return "max_steps" if len(trajectory.steps) >= self.max_steps else None

    def tokens_left(self, trajectory: Trajectory) -> int | None:
        """Return the number of tokens that may still be sampled; None without a limit."""
        if self.max_total_tokens is None:
            return None
        used = trajectory.metadata.get("usage", {}).get("completion_tokens", 0)
        return max(0, self.max_total_tokens - used)

    def create_system_prompt(self) -> str:
        """Return the instructions for the model: its tools and how to write a call."""
        if not self.tools:
            return "Solve the task. Write your result after 'Final Answer:'."
        return (
            "Solve the task with the help of these tools:\n"
            f"{self.tools_text()}\n\n"
            "To use one, write a line such as\n"
            "Action: tool_name(parameter='text', other=1)\n"
            "and stop; its result is told to you. When you know the result of the task, write\n"
            "Final Answer: the result"
        )

    def tools_text(self) -> str:
        """Return the description of the agent's tools for a system prompt."""
        return tools_text(self.tool_schemas().values())

    def offered_tools(self) -> dict[str, Any]:
        """Return the arguments that offer the tools to the model natively; none by default."""
        return {}

    def parse_llm_output(self, output: Any) -> TrajectoryStep:
        """Read a model's reply as one step.

        `Action: name(k=v)` or a native call becomes an action with `tool_name` and `tool_args`,
        `Final Answer:` a final answer; any other reply is a thought.
        """
        return first_step_of(as_model_response(output), self.reply_format())

    async def generate(
        self, llm_generate_func: Any, trajectory: Trajectory, **kwargs: Any
    ) -> list[TrajectoryStep]:
        """Call the model once and return the steps of its reply, not yet appended.

        Raises:
            Exception: The model's client raised it.
            TypeError: The client returned a value of an unknown type.
        """
        messages = self.format_messages_for_llm(trajectory)
        response = await self.call_llm(llm_generate_func, messages, trajectory, **kwargs)
        prompt_chars = content_chars(messages) if response.prompt_tokens is None else 0
        return read_reply(response, self.reply_format(), prompt_chars=prompt_chars)

    def reply_format(self) -> ReplyFormat:
        """Return the rules by which this agent reads replies; overridden for other rules."""
        return ReplyFormat(tools=self.tool_schemas())

    async def call_llm(
        self,
        llm_generate_func: Any,
        messages: list[dict[str, Any]],
        trajectory: Trajectory,
        **kwargs: Any,
    ) -> ModelResponse:
        """Call the model's client, sync or async, with the agent's sampling parameters."""
        if not callable(llm_generate_func):
            llm_generate_func = llm_generate_func.generate
        left = self.tokens_left(trajectory)
        options: dict[str, Any] = {
            "max_tokens": min(self.max_tokens_per_step, left) if left else self.max_tokens_per_step,
            "temperature": self.temperature,
            **self.config.get("generate_kwargs", {}),
            **kwargs,
        }
        return as_model_response(await call_sync_or_async(llm_generate_func, messages, **options))

    async def execute_tool_call(
        self,
        tool_name: str,
        tool_args: Mapping[str, Any] | None,
        trajectory: Trajectory,
        *,
        call_id: str | None = None,
    ) -> TrajectoryStep:
        """Run a tool and return its result as a step, not yet appended.

        A failed call is a result with `execution_successful` False and the error for the model.
        Only the failure of a sandbox (`SandboxFailure`) raises.

        Args:
            tool_name: One of the agent's tools.
            tool_args: Its arguments by name.
            trajectory: The trajectory that makes the call; its per-tool counts are updated.
            call_id: The native call's id; None takes it from the trajectory's last step.
        """
        started = time.perf_counter()
        if call_id is None and trajectory.steps:
            last = trajectory.steps[-1]
            if last.step_type is StepType.ACTION:
                call_id = last.metadata.get("tool_call_id")
        # The call is counted before it begins: `release_tools` releases the state of counted tools,
        # and an interrupted call leaves state, too.
        counts = _count_call(trajectory, tool_name)
        if tool_name in self.tools:
            result = await invoke_tool_once(
                tool_name,
                self.tools[tool_name],
                trajectory.request_id,
                dict(tool_args or {}),
                timeout_s=self.tool_timeout_s,
            )
        else:
            known = ", ".join(self.tools) or "none"
            error = f"there is no tool named {tool_name!r}; available tools: {known}"
            result = ToolResult(success=False, error=error)
        counts["errors"] += not result.success
        duration_ms = round((time.perf_counter() - started) * 1000, 3)
        return self.result_step(tool_name, tool_args, result, call_id, duration_ms)

    def result_step(
        self,
        tool_name: str | None,
        tool_args: Mapping[str, Any] | None,
        result: ToolResult,
        call_id: str | None = None,
        duration_ms: float = 0.0,
    ) -> TrajectoryStep:
        """Return a tool's result as a step, with the message for the model."""
        text = cut_middle(result.to_text(), self.max_observation_chars)
        metadata: dict[str, Any] = {
            "execution_successful": result.success,
            "duration_ms": duration_ms,
        }
        if call_id is not None:
            message = {"role": "tool", "tool_call_id": call_id, "content": text}
            metadata |= {"tool_call_id": call_id, "chat_message": message}
        else:
            metadata["chat_message"] = {"role": "user", "content": f"Observation: {text}"}
        for name in ("error", "metrics", "stop"):
            if value := getattr(result, name):
                metadata[name] = value
        return TrajectoryStep(
            StepType.ACTION_RESULT,
            text,
            metadata,
            tool_name=tool_name,
            tool_args=dict(tool_args or {}),
            tool_result=result.result,
            reward_score=result.reward_score or None,
        )

    def format_messages_for_llm(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        """Return the messages to send: the system prompt and the conversation.

        The system prompt used is recorded in the trajectory at the first call.
        """
        if "system_prompt" not in trajectory.metadata:
            trajectory.metadata["system_prompt"] = self.full_system_prompt(trajectory)
        return trajectory.get_messages()

    def full_system_prompt(self, trajectory: Trajectory) -> str:
        """Return the agent's system prompt and the prompt's own, as one text."""
        if self._system_prompt is None:
            option = self.config.get("system_prompt")
            self._system_prompt = "\n\n".join(filter(None, (option, self.create_system_prompt())))
        prompts_own = trajectory.metadata.get("prompt_system")
        return "\n\n".join(filter(None, (self._system_prompt, prompts_own)))

    def calculate_step_reward(self, step: TrajectoryStep, trajectory: Trajectory) -> float | None:
        """Return a step's reward, None if it has none; override to shape rewards."""
        return step.reward_score

    def finalize_trajectory(self, trajectory: Trajectory) -> None:
        """Complete a trajectory: stop reason, step rewards and, if there are any, their sum."""
        trajectory.metadata.setdefault("stop_reason", self.decide_stop(trajectory) or "answered")
        for step in trajectory.steps:
            step.reward_score = self.calculate_step_reward(step, trajectory)
        is_scored = any(step.reward_score is not None for step in trajectory.steps)
        if is_scored and trajectory.final_reward is None:
            trajectory.final_reward = trajectory.get_total_reward()
        trajectory.is_completed = True
        if self.on_finalized is not None:
            self.on_finalized(trajectory)

    async def release_tools(self, trajectory: Trajectory) -> None:
        """Release the state that tools keep for the trajectory."""
        for name in trajectory.metadata.get("tools", {}):
            if name in self.tools:
                await release_tool(self.tools[name], trajectory.request_id)


def _count_call(trajectory: Trajectory, tool_name: str) -> dict[str, int]:
    tools = trajectory.metadata.setdefault("tools", {})
    counts = tools.setdefault(tool_name, {"calls": 0, "errors": 0})
    counts["calls"] += 1
    return counts
