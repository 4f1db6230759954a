"""A plain async function as an agent, with its model calls and tool calls recorded.

Made by `registry.register_agent`. The function is `async def solve(prompt, llm, ...)`. It may also
have the parameters `tools`, `request_id`, `trajectory`, `config` and `endpoint`. Further parameters
need a default, and are options of the agent. Must not: change the messages that the function sends
to the model, or turn its exceptions into an answer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from workers.agents.recorded_model import RecordedModel
from workers.core.base_agent import BaseAgent
from workers.core.call_parser import CallParseError, parse_json_arguments
from workers.core.conversation import begin_trajectory
from workers.core.endpoint import open_endpoint
from workers.core.model_response import NativeToolCall
from workers.core.options import Options, options_of
from workers.core.tool_schemas import ToolResult
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

ENDPOINT = "endpoint"
ARGUMENTS = ("tools", "request_id", "trajectory", "config", ENDPOINT)
ANSWER_KEYS = ("answer", "content")

logger = logging.getLogger(__name__)


class AnswerShapeError(TypeError):
    """A function agent returned a value that is no answer, so a retry cannot help."""


class BoundTool:
    """One tool, bound to the trajectory: `await tool(expression="1 + 1")` gives a `ToolResult`."""

    def __init__(self, name: str, agent: BaseAgent, trajectory: Trajectory) -> None:
        self.name = name
        self._agent = agent
        self._trajectory = trajectory

    async def __call__(self, **arguments: Any) -> ToolResult:
        """Run the tool; a failure is a result with success=False."""
        # No chat message: the function decides which part of the result the model sees.
        action = TrajectoryStep(
            StepType.ACTION, self.name, {"chat_message": None}, self.name, arguments
        )
        self._trajectory.add_step(action)
        step = await self._agent.execute_tool_call(self.name, arguments, self._trajectory)
        step.metadata["chat_message"] = None
        self._trajectory.add_step(step)
        return ToolResult(
            success=step.metadata["execution_successful"],
            result=step.tool_result,
            shown=step.content,
            error=step.metadata.get("error"),
            metrics=step.metadata.get("metrics", {}),
        )


class Tools(dict[str, BoundTool]):
    """The agent's tools by name, bound to one trajectory."""

    def __init__(self, agent: BaseAgent, trajectory: Trajectory) -> None:
        super().__init__({name: BoundTool(name, agent, trajectory) for name in agent.tools})
        self._agent = agent
        self._trajectory = trajectory

    def __missing__(self, name: str) -> BoundTool:
        known = ", ".join(self) or "none"
        raise KeyError(f"there is no tool named {name!r}; available tools: {known}")

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas for `llm(messages, tools=...)`."""
        return [schema.to_openai() for schema in self._agent.tool_schemas().values()]

    async def answer(self, call: NativeToolCall) -> dict[str, Any]:
        """Run a native call of the model and return the message with its result."""
        try:
            arguments = parse_json_arguments(call.arguments)
        except CallParseError as error:
            result = ToolResult(success=False, error=str(error))
            step = self._agent.result_step(call.name, None, result, call.id)
        else:
            step = await self._agent.execute_tool_call(
                call.name, arguments, self._trajectory, call_id=call.id
            )
        self._trajectory.add_step(step)
        return dict(step.metadata["chat_message"])


class FunctionAgent(BaseAgent):
    """An agent whose `run_trajectory` is a plain function; each function gets a subclass.

    With the option `require_model_calls` a run without a recorded model call is an error.
    """

    options: ClassVar[Options] = {"require_model_calls": bool}
    function: ClassVar[Callable[..., Any]]
    wanted: ClassVar[tuple[str, ...]] = ()
    option_names: ClassVar[tuple[str, ...]] = ()
    _has_reported = False

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Run the function and record its answer, see `BaseAgent.run_trajectory`.

        Raises:
            AnswerShapeError: The function returned a value that is no answer.
        """
        trajectory = begin_trajectory(prompt, request_id, kwargs.get("trajectory"))
        llm = RecordedModel(self, llm_generate_func, trajectory)
        offered = {
            "tools": Tools(self, trajectory),
            "request_id": request_id,
            "trajectory": trajectory,
            "config": self.config,
        }
        wanted = {name: offered[name] for name in self.wanted if name in offered}
        wanted |= {name: self.config[name] for name in self.option_names if name in self.config}
        try:
            async with AsyncExitStack() as stack:
                if ENDPOINT in self.wanted:
                    opened = open_endpoint(llm_generate_func, llm)
                    wanted[ENDPOINT] = await stack.enter_async_context(opened)
                given = await type(self).function(prompt, llm, **wanted)
        finally:
            await self.release_tools(trajectory)
        if llm.n_calls == 0:
            self._report_no_call()
        trajectory = self._with_answer(given, trajectory, has_reply=llm.n_calls > 0)
        self.finalize_trajectory(trajectory)
        return trajectory

    def _report_no_call(self) -> None:
        """Report that no model call was recorded: as an error if calls are required, else once."""
        text = (
            f"agent {type(self).__name__!r} ended without a recorded model call. Calls of a "
            "client of its own are not recorded, limited or counted, and no trainer can use them. "
            "Ask for the parameter `endpoint`, and give it to the framework as its model's server."
        )
        if self.config.get("require_model_calls"):
            raise AnswerShapeError(text)
        if not self._has_reported:
            self._has_reported = True
            logger.warning("%s The option require_model_calls makes this an error.", text)

    def _with_answer(self, given: Any, trajectory: Trajectory, has_reply: bool) -> Trajectory:
        if isinstance(given, Trajectory):
            return given
        if isinstance(given, Mapping):
            given = self._take_dict(given, trajectory)
        if not isinstance(given, str):
            raise AnswerShapeError(
                f"agent {type(self).__name__!r} returned {type(given).__name__}; it must return "
                'the answer as text, a dict with "answer", or a Trajectory'
            )
        # No message after a model call: the conversation already ends with the model's reply.
        metadata: dict[str, Any] = {"chat_message": None} if has_reply else {}
        trajectory.add_step(TrajectoryStep(StepType.FINAL_ANSWER, given, metadata))
        return trajectory

    def _take_dict(self, given: Mapping[str, Any], trajectory: Trajectory) -> Any:
        """Record reward and metadata of the function's result; return its answer."""
        key = next((key for key in ANSWER_KEYS if key in given), None)
        if key is None:
            raise AnswerShapeError(
                f"agent {type(self).__name__!r} returned a dict with the keys "
                f'{", ".join(map(repr, given)) or "none"}; it needs "answer" (text)'
            )
        reward = given.get("reward")
        if reward is not None:
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                raise AnswerShapeError(
                    f"agent {type(self).__name__!r}: the reward must be a number"
                )
            trajectory.final_reward = float(reward)
        trajectory.metadata.update(given.get("metadata") or {})
        return given[key]


def agent_class_of(name: str, function: Callable[..., Any]) -> type[FunctionAgent]:
    """Return the agent class that runs a function.

    Raises:
        TypeError: The function is not `async def f(prompt, llm, ...)`, or has an unknown parameter
            without a default.
    """
    label = f"agent {name!r}: {getattr(function, '__name__', function)!s}"
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{label} must be an 'async def' function or a subclass of BaseAgent")
    parameters = list(inspect.signature(function).parameters.values())
    positional = [item for item in parameters if item.kind is not item.KEYWORD_ONLY][:2]
    if len(positional) < 2 or any(item.kind is item.VAR_KEYWORD for item in positional):
        raise TypeError(f"{label} must take two parameters first: prompt and llm")
    wanted: list[str] = []
    option_names: list[str] = []
    for item in parameters:
        if item in positional or item.kind is item.VAR_POSITIONAL:
            continue
        if item.kind is item.VAR_KEYWORD:
            # An endpoint is made only for a function that names it.
            wanted += [name for name in ARGUMENTS if name not in (*wanted, ENDPOINT)]
        elif item.name in ARGUMENTS:
            wanted.append(item.name)
        elif item.default is not item.empty:
            option_names.append(item.name)
        else:
            raise TypeError(
                f"{label} asks for {item.name!r}; besides prompt and llm it may ask for: "
                f"{', '.join(ARGUMENTS)}, and for options that have a default"
            )
    attributes: dict[str, Any] = {
        "function": staticmethod(function),
        "wanted": tuple(wanted),
        "option_names": tuple(option_names),
        "__doc__": function.__doc__,
        "__module__": function.__module__,
    }
    if "config" not in wanted:
        types = options_of(function)
        attributes["options"] = {name: types[name] for name in option_names}
    return type(name, (FunctionAgent,), attributes)
