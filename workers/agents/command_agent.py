"""The `command` agent: a command-line agent in a sandbox that reaches its model and nothing else.

Used by name through the registry. The command finds the model by the environment variables of the
SDKs; the worker's gateway answers and records its calls. Must not: give the command a network, or
take an answer of a command that failed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import resources
from typing import Any, ClassVar, get_type_hints

from workers.agents.function_agent import AnswerShapeError
from workers.agents.recorded_model import RecordedModel
from workers.core.base_agent import BaseAgent
from workers.core.conversation import begin_trajectory
from workers.core.endpoint import Endpoint, open_endpoint
from workers.core.options import Options
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.sandbox.base import CommandResult, Sandbox, SandboxLimits
from workers.sandbox.kinds import CONTAINER_KINDS, open_sandbox
from workers.sandbox.local import ConfinedSandbox

#: Port of the model on the sandbox's own loopback, where no other program listens.
PORT = 8000
PROMPT_FILE = "prompt.txt"
_FORWARDER = "socket_forwarder.py"
#: Longest argument that Linux takes.
_MOST_ARGUMENT_BYTES = 128 * 1024 - 1
#: The attempt's time limit ends the command; these limits only bound processes that it left.
_LIMITS: Mapping[str, Any] = {"wall_s": 86400.0, "cpu_s": 86400.0}
_TAIL_CHARS = 2000


class CommandFailed(RuntimeError):
    """The command ended with an error, or without an answer."""


class CommandAgent(BaseAgent):
    """Runs a command for each prompt; its output, or a file that it writes, is the answer.

    The prompt's field `files` (path to content) is written into the sandbox before.

    Args:
        command: Program and arguments. `{prompt}`, `{prompt_file}` and `{model}` are replaced by
            the prompt's text, the path of a file with it, and the model's name.
        answer: `stdout`, or `{"file": path}`.
        env: Further environment variables of the command.
        sandbox: Kind of sandbox, as in `open_sandbox`; no container.
        sandbox_limits: As in `SandboxLimits`.
        sandbox_options: Further arguments of the sandbox, such as `readable` paths.
        **kwargs: As `BaseAgent`.
    """

    options: ClassVar[Options] = {"sandbox_limits": get_type_hints(SandboxLimits)}

    def __init__(
        self,
        *args: Any,
        command: list[str] | None = None,
        answer: str | dict[str, str] = "stdout",
        env: dict[str, str] | None = None,
        sandbox: str = "auto",
        sandbox_limits: Mapping[str, Any] | None = None,
        sandbox_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not command:
            raise ValueError("the agent 'command' needs its option command, a list of words")
        if sandbox in CONTAINER_KINDS:
            raise ValueError(
                f"the agent 'command' runs on the worker's machine, not in {sandbox}; choose "
                "bubblewrap or namespaces"
            )
        self.command = command
        self.answer_file = _answer_file(answer)
        self.env = dict(env or {})
        self.sandbox: Any = sandbox
        self.sandbox_limits = SandboxLimits(**{**_LIMITS, **(sandbox_limits or {})})
        self.sandbox_options = dict(sandbox_options or {})
        super().__init__(*args, **kwargs)

    async def run_trajectory(
        self, prompt: dict[str, Any], llm_generate_func: Any, request_id: str, **kwargs: Any
    ) -> Trajectory:
        """Run the command and record its answer, see `BaseAgent.run_trajectory`.

        Raises:
            SandboxFailure: The sandbox would not start or died.
            CommandFailed: The command ended with an error, or without an answer.
            AnswerShapeError: The command did not call its model.
        """
        trajectory = begin_trajectory(prompt, request_id, kwargs.get("trajectory"))
        text = trajectory.steps[0].content
        llm = RecordedModel(self, llm_generate_func, trajectory)
        async with (
            open_endpoint(llm_generate_func, llm, with_socket=True) as endpoint,
            await self._open_sandbox(endpoint) as sandbox,
        ):
            files = {PROMPT_FILE: text, **(prompt.get("files") or {})}
            for path, content in files.items():
                await sandbox.write_file(path, content.encode())
            result = await self._run(sandbox, endpoint, text)
            answer = await self._answer_of(sandbox, result)
        if llm.n_calls == 0:
            raise AnswerShapeError(
                f"{self.command[0]} ended without a model call. It must call the endpoint that "
                "OPENAI_BASE_URL or ANTHROPIC_BASE_URL names in its environment."
            )
        trajectory.add_step(TrajectoryStep(StepType.FINAL_ANSWER, answer, {"chat_message": None}))
        self.finalize_trajectory(trajectory)
        return trajectory

    async def _open_sandbox(self, endpoint: Endpoint) -> Sandbox:
        assert endpoint.socket_path is not None
        readable = (*self.sandbox_options.get("readable", ()), endpoint.socket_path)
        options = {**self.sandbox_options, "readable": readable}
        return await open_sandbox(self.sandbox, limits=self.sandbox_limits, **options)

    async def _run(self, sandbox: Sandbox, endpoint: Endpoint, text: str) -> CommandResult:
        command = self._filled_command(sandbox, endpoint, text)
        if not isinstance(sandbox, ConfinedSandbox):
            # Unconfined commands share the worker's loopback.
            return await sandbox.run(command, env=self._environment(endpoint, endpoint.base_url))
        assert endpoint.socket_path is not None
        forwarder = [sys.executable, "-I", "-S", "-c", forwarder_source()]
        return await sandbox.run(
            [*forwarder, endpoint.socket_path, str(PORT), *command],
            env=self._environment(endpoint, f"http://127.0.0.1:{PORT}/v1"),
        )

    def _filled_command(self, sandbox: Sandbox, endpoint: Endpoint, text: str) -> list[str]:
        values = {
            "{prompt_file}": f"{sandbox.root}/{PROMPT_FILE}",
            "{model}": endpoint.model,
            "{prompt}": text,  # the last one: the prompt may hold the others
        }
        command = [_filled(argument, values) for argument in self.command]
        if any(len(argument.encode()) > _MOST_ARGUMENT_BYTES for argument in command):
            raise ValueError(
                "the prompt is too long for an argument of a command; use {prompt_file} in place "
                "of {prompt}"
            )
        return command

    def _environment(self, endpoint: Endpoint, base_url: str) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,  # older name, which LiteLLM still reads
            "OPENAI_API_KEY": endpoint.api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
            "MODEL_ID": endpoint.model,
            **self.env,
        }

    async def _answer_of(self, sandbox: Sandbox, result: CommandResult) -> str:
        if not result.succeeded:
            raise CommandFailed(_failure_text(self.command[0], result, "failed"))
        if self.answer_file is None:
            return result.stdout.strip()
        try:
            data = await sandbox.read_file(self.answer_file)
        except OSError as error:
            problem = f"left no answer in {self.answer_file} ({error.strerror})"
            raise CommandFailed(_failure_text(self.command[0], result, problem)) from error
        return data.decode("utf-8", "replace").strip()


def _answer_file(answer: str | dict[str, str]) -> str | None:
    """Return the path of the answer; None: the output is the answer."""
    if answer == "stdout":
        return None
    if not isinstance(answer, dict) or set(answer) != {"file"}:
        raise ValueError(f'the option answer is {answer!r}; give "stdout" or {{"file": path}}')
    return answer["file"]


def forwarder_source() -> str:
    """Return the text of the program that connects the sandbox's loopback to the gateway."""
    return (resources.files("workers.sandbox") / _FORWARDER).read_text()


def _filled(argument: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(name, value)
    return argument


def _failure_text(program: str, result: CommandResult, problem: str) -> str:
    end = f"exit code {result.exit_code}" + (", out of time" if result.timed_out else "")
    output = (result.stderr or result.stdout).strip()[-_TAIL_CHARS:]
    return f"{program} {problem} ({end}): {output or 'no output'}"
