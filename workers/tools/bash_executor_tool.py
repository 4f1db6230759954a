"""The `bash_executor` tool: a shell command in a sandbox.

Used by name through the tool registry. All tools of one trajectory share its sandbox, so the file
editor sees the files that commands write. Must not: run anything outside the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.core.options import Options
from workers.core.tool_schemas import ToolResult, create_openai_tool_schema, cut_middle
from workers.sandbox.base import CommandResult
from workers.sandbox.shared import SANDBOX_OPTIONS, SHARED
from workers.tools.sandbox_tool import SandboxTool

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_OUTPUT_CHARS = 16_000

_SCHEMA = create_openai_tool_schema(
    "bash_executor",
    "Run a shell command in a sandbox and return its output. Each call is a new shell; files stay.",
    {
        "command": {"type": "string", "description": "The command, as typed into bash."},
        "working_directory": {
            "type": "string",
            "description": "Directory to run in, relative to the root of the sandbox.",
        },
        "timeout": {"type": "number", "description": "Seconds after which it is killed."},
    },
    ["command"],
)


class BashExecutorTool(SandboxTool):
    """Runs shell commands.

    Args:
        config: `timeout` (default seconds of a command, 30), `max_output_chars` (16,000), `env`
            (the commands' variables; they see none of the worker's), and the settings of the
            sandbox: `sandbox` (a kind, or an open sandbox), `root`, `limits`, `options`.
    """

    options: ClassVar[Options] = {
        **SANDBOX_OPTIONS,
        "timeout": float,
        "max_output_chars": int,
        "env": dict[str, str],
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, _SCHEMA)
        self._timeout_s = float(self.config.get("timeout", DEFAULT_TIMEOUT_S))
        self._output_chars = int(self.config.get("max_output_chars", DEFAULT_OUTPUT_CHARS))
        self._env = dict(self.config.get("env") or {})

    async def execute_tool(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Run one command; with an exit code other than 0 the result is a failure with the output.

        The result has `stdout`, `stderr`, `return_code` and `command`.

        Raises:
            SandboxFailure: The sandbox would not start or died.
        """
        if problems := self.parameter_problems(parameters):
            return ToolResult(success=False, error="; ".join(problems))
        if "\0" in parameters["command"] + parameters.get("working_directory", ""):
            return ToolResult(success=False, error="a command cannot hold a NUL character")
        sandbox = await SHARED.join(self, instance_id, self.sandbox_settings)
        result = await sandbox.run(
            parameters["command"],
            cwd=parameters.get("working_directory") or None,
            timeout_s=float(parameters.get("timeout") or self._timeout_s),
            env=self._env,
        )
        return self._as_tool_result(parameters["command"], result)

    def _as_tool_result(self, command: str, result: CommandResult) -> ToolResult:
        text = cut_middle(_combined(result), self._output_chars)
        error = None
        if result.timed_out:
            error = f"the command was killed after {result.duration_s:.1f} s\n{text}".rstrip()
        elif result.exit_code != 0:
            error = f"the command ended with exit code {result.exit_code}\n{text}".rstrip()
        return ToolResult(
            success=result.succeeded,
            result={
                "stdout": cut_middle(result.stdout, self._output_chars),
                "stderr": cut_middle(result.stderr, self._output_chars),
                "return_code": result.exit_code,
                "command": command,
            },
            shown=text or "(no output)",
            error=error,
            metrics={
                "exit_code": result.exit_code,
                "timed_out": result.timed_out,
                "truncated": result.truncated or len(_combined(result)) > self._output_chars,
                "duration_s": round(result.duration_s, 3),
            },
        )


def _combined(result: CommandResult) -> str:
    parts = [result.stdout.rstrip("\n")]
    if result.stderr.strip():
        parts += ["[stderr]", result.stderr.rstrip("\n")]
    return "\n".join(part for part in parts if part)
