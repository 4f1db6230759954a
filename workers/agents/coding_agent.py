"""The `coding` agent: understands, explores, edits, tests and refines in a working directory.

Used by name through the registry. Each trajectory has its own sandbox, unless the options name a
working directory. Must not: reward its work by anything but the task's tests.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, ClassVar, get_type_hints

from workers.agents.coding_progress import explored_path, is_edit, read_progress
from workers.agents.coding_task import CodingTask, TaskError, prepare_task
from workers.agents.coding_verdict import NO_GIT, TestVerdict, judge, judge_in_place
from workers.agents.task_diff import DiffRefused, read_diff
from workers.agents.tool_calling_agent import ToolCallingAgent
from workers.core.base_tool import BaseAgenticTool
from workers.core.conversation import begin_trajectory
from workers.core.interaction import interacting
from workers.core.options import Options
from workers.core.tools_config import create_tools
from workers.core.trajectory import Trajectory, TrajectoryStep
from workers.sandbox.base import Sandbox, SandboxLimits
from workers.sandbox.kinds import CONTAINER_KINDS
from workers.sandbox.shared import SHARED, SandboxSettings

_SANDBOX_TOOLS = ("bash_executor", "file_editor", "search")


class CodingAgent(ToolCallingAgent):
    """Works on code with a shell, an editor and a search.

    The prompt may have `files`, `test_command` and the other fields of `CodingTask`; the options of
    the same names are their defaults. With a test command the final reward is the verdict of the
    tests on a clean copy plus the diff, 1.0 or 0.0. In a working directory, or in an open sandbox
    as the option `sandbox`, the tests run where the model worked.

    Args:
        max_steps: As `BaseAgent`; 60 by default.
        max_files_to_explore: Limit of different files that are shown; further files are refused.
        max_implementation_attempts: Limit of failed test runs after an edit; then further edits are
            refused.
        working_directory: Directory that all trajectories work in; with None each has its own.
        sandbox: Kind of sandbox, as in `open_sandbox`.
        sandbox_limits: As in `SandboxLimits`.
        sandbox_options: Further arguments of the sandbox, such as an image.
        native_tools: As `ToolCallingAgent`; here True by default.
        **kwargs: As `ToolCallingAgent`, and the fields of `CodingTask`.
    """

    options: ClassVar[Options] = {
        **get_type_hints(CodingTask),
        "sandbox_limits": get_type_hints(SandboxLimits),
    }
    default_sandbox = "auto"
    judges_itself = True

    def __init__(
        self,
        max_steps: int = 60,
        *args: Any,
        max_files_to_explore: int = 20,
        max_implementation_attempts: int = 3,
        working_directory: str | None = None,
        sandbox: Any = None,
        sandbox_limits: Mapping[str, Any] | None = None,
        sandbox_options: Mapping[str, Any] | None = None,
        native_tools: bool = True,
        **kwargs: Any,
    ) -> None:
        self.max_files_to_explore = max_files_to_explore
        self.max_implementation_attempts = max_implementation_attempts
        self.working_directory = working_directory
        self.sandbox = sandbox or self.default_sandbox
        self.sandbox_limits = dict(sandbox_limits or {})
        self.sandbox_options = dict(sandbox_options or {})
        super().__init__(max_steps, *args, native_tools=native_tools, **kwargs)

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Work on one task, see `BaseAgent.run_trajectory`.

        Raises:
            SandboxFailure: The sandbox would not start or died.
            TaskError: A field of the task is not of its type, or the task cannot be judged.
        """
        trajectory = begin_trajectory(prompt, request_id, kwargs.get("trajectory"))
        task = CodingTask.from_prompt(prompt, self.config)
        settings = self.settings_for(prompt)
        is_judged = task.test_command is not None
        async with (
            interacting(self.interactions, trajectory),
            self.workspace(settings, request_id) as sandbox,
        ):
            base_tree = await prepare_task(task, sandbox, has_own_files=self.has_own_files)
            if is_judged and base_tree is None and not self.judges_in_place:
                raise TaskError(NO_GIT)
            agent = self.bound_to(sandbox, task)
            try:
                await agent.work(trajectory, llm_generate_func)
            finally:
                await agent.release_tools(trajectory)
            verdict, diff = await self.record_work(task, sandbox, base_tree, trajectory)
            if is_judged and self.judges_in_place:
                verdict = await judge_in_place(task, sandbox, base_tree)
        # The model's sandbox is closed before, so that a rollout never has two.
        if is_judged and verdict is None:
            verdict = await judge(task, diff, settings)
        self.conclude(verdict, trajectory)
        self.finalize_trajectory(trajectory)
        return trajectory

    @property
    def has_own_files(self) -> bool:
        """Whether the working directory belongs to the user, and not to a container."""
        return self.working_directory is not None and self.sandbox not in CONTAINER_KINDS

    @property
    def judges_in_place(self) -> bool:
        """Whether no clean copy can be made, because the files or the sandbox are the user's."""
        return self.has_own_files or not isinstance(self.sandbox, str)

    def settings_for(self, prompt: Mapping[str, Any]) -> SandboxSettings:
        """Return the settings of a prompt's sandbox."""
        return SandboxSettings.from_config(
            {
                "sandbox": self.sandbox,
                "root": self.working_directory,
                "limits": self.sandbox_limits,
                "options": self.options_for(prompt),
            }
        )

    @asynccontextmanager
    async def workspace(self, settings: SandboxSettings, request_id: str) -> AsyncIterator[Sandbox]:
        """Open the sandbox in which one trajectory's model works."""
        # Trajectories in one working directory share its sandbox.
        try:
            yield await SHARED.join(self, request_id, settings)
        finally:
            await SHARED.leave(self, request_id, settings)

    def options_for(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return the further arguments of a prompt's sandbox."""
        return self.sandbox_options

    def bound_to(self, sandbox: Sandbox, task: CodingTask) -> CodingAgent:
        """Return this agent with tools that work in the sandbox, for one trajectory."""
        agent = copy.copy(self)
        tools = self.tools or create_tools((*_SANDBOX_TOOLS, "finish"))
        agent.set_tools({name: _in_sandbox(name, tool, sandbox) for name, tool in tools.items()})
        agent.config = {**self.config, "test_command": task.test_command}
        return agent

    async def record_work(
        self, task: CodingTask, sandbox: Sandbox, base_tree: str | None, trajectory: Trajectory
    ) -> tuple[TestVerdict | None, bytes]:
        """Record phases and diff; return the diff, and a verdict if the diff cannot be judged."""
        progress = read_progress(trajectory, task.test_command)
        trajectory.metadata["phases"] = [str(phase) for phase in progress.phases]
        if base_tree is None:
            return None, b""
        try:
            diff = await read_diff(sandbox, base_tree)
        except DiffRefused as refusal:
            trajectory.metadata["diff"] = ""
            return (TestVerdict(False, str(refusal)) if task.test_command else None), b""
        trajectory.metadata["diff"] = diff.decode(errors="replace")
        return None, diff

    def conclude(self, verdict: TestVerdict | None, trajectory: Trajectory) -> None:
        """Record the verdict, if the task has tests, as the reward."""
        if verdict is not None:
            trajectory.metadata["tests"] = asdict(verdict)
            trajectory.final_reward = 1.0 if verdict.passed else 0.0

    def create_system_prompt(self) -> str:
        """Return the instructions: the order of work, and the tools in text mode."""
        test_command = self.config.get("test_command")
        tests = f" with: {test_command}" if test_command else ""
        prompt = (
            "You are a programmer working in a directory; all paths are relative to it. Go about "
            "the task in this order:\n"
            "1. Understand what is asked.\n"
            f"2. Explore the code that matters (at most {self.max_files_to_explore} files).\n"
            "3. Implement the smallest change that does it.\n"
            f"4. Run the tests{tests}\n"
            f"5. Refine until they pass (at most {self.max_implementation_attempts} attempts).\n"
            "Then call the tool finish with a summary of what you changed."
        )
        if self.native_tools:
            return prompt
        return (
            f"{prompt}\n\nYour tools are:\n{self.tools_text()}\n\n"
            "In each turn write\n"
            "Thought: what you know and what to do next\n"
            "Action: tool_name(parameter='text', other=1)\n"
            "and stop there. You are then told the tool's result."
        )

    def refusal(
        self, number: int, steps: list[TrajectoryStep], trajectory: Trajectory
    ) -> str | None:
        """Refuse to show files, or to edit, beyond the limits."""
        call = steps[number]
        args = call.tool_args or {}
        path = explored_path(call.tool_name, args)
        if path is None and not is_edit(call.tool_name, args):
            return None
        progress = read_progress(trajectory, self.config.get("test_command"))
        if path is not None:
            is_new = path not in progress.explored
            if is_new and len(progress.explored) >= self.max_files_to_explore:
                return (
                    f"not shown: {len(progress.explored)} files were shown already, which is the "
                    "limit. Work with what you know."
                )
        elif progress.failed_attempts >= self.max_implementation_attempts:
            return (
                f"not edited: the tests failed after {progress.failed_attempts} attempts, which is "
                "the limit. Call finish."
            )
        return None


def _in_sandbox(name: str, tool: Any, sandbox: Sandbox) -> Any:
    """Return a tool of the same settings for this sandbox, unless the settings name another one."""
    if name not in _SANDBOX_TOOLS or not isinstance(tool, BaseAgenticTool):
        return tool
    if tool.config.get("root") or not isinstance(tool.config.get("sandbox", ""), str):
        return tool
    tool_class: Any = type(tool)
    return tool_class({**tool.config, "sandbox": sandbox})
