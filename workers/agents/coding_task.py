"""A coding task in a sandbox: its fields, and the files that are written before the model's work.

Used by the coding agents and by `coding_verdict`. All steps are commands in the sandbox, so they
are the same for a local sandbox, a container and a pod. A failing command of this module is a
`SandboxFailure`, never a result of the model's work. Must not: run the task's tests.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from workers.agents.evidence import TestRunner
from workers.agents.task_diff import take_base_tree
from workers.sandbox.base import Sandbox, SandboxFailure
from workers.sandbox.workspace import check_root

MAX_REPOSITORY_BYTES = 512 * 1024**2
_PYTHON = "import os, sys; print(os.path.dirname(sys.executable)); print(*sys.version_info[:3])"


class TaskError(ValueError):
    """The task cannot be worked on or judged; its author must correct it, a retry cannot help."""


@dataclass(frozen=True)
class CodingTask:
    """The files and commands of one task.

    Args:
        files: Path to content, written before the work begins.
        repository: A local directory that is copied in before the files; for a container that has
            a repository already, None.
        setup_command: Run once before the work begins; its changes do not belong to the diff.
        test_command: Runs the tests; None gives no reward.
        test_files: Path to content, written before the tests run; existing files are replaced.
        restored_paths: Paths whose changes do not count.
        test_timeout_s: Longest run of the tests; after it they have failed.
        test_runner: Program that leaves a record of the tests; `auto` finds it in the command, and
            with `none` only the exit code counts.
        required_tests: Tests that must pass; then failures of other tests do not matter.
        allow_paths: Globs of protected paths that the model may change.
        python: Interpreter, by name or path in the sandbox; its folder comes first in PATH.
        gold_patch: A diff that solves the task, for `rollout task check` and the control run.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    repository: str | None = None
    setup_command: str | None = None
    test_command: str | None = None
    test_files: Mapping[str, str] = field(default_factory=dict)
    restored_paths: Sequence[str] = ()
    test_timeout_s: float = 600.0
    test_runner: TestRunner = "auto"
    required_tests: Sequence[str] = ()
    allow_paths: Sequence[str] = ()
    python: str | None = None
    gold_patch: str | None = None

    @classmethod
    def from_prompt(cls, prompt: Mapping[str, Any], defaults: Mapping[str, Any]) -> CodingTask:
        """Take the fields that a prompt has, else those of the agent's options.

        Raises:
            TaskError: A field is not of its type.
        """
        values = {
            name: prompt[name] if prompt.get(name) is not None else defaults.get(name)
            for name in cls.__dataclass_fields__
        }
        values = {name: value for name, value in values.items() if value is not None}
        try:
            return _CODING_TASK.validate_python(values)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field_path = ".".join(map(str, problem["loc"]))
            raise TaskError(f"the task's {field_path} is wrong: {problem['msg']}") from None


_CODING_TASK = TypeAdapter(CodingTask)


async def prepare_task(task: CodingTask, sandbox: Sandbox, *, has_own_files: bool) -> str | None:
    """Put the task's files into the sandbox; returns the git tree its diff is taken against.

    Args:
        task: The task.
        sandbox: The sandbox of the trajectory.
        has_own_files: Whether the directory belongs to the user; then no repository is created.

    Returns:
        None without git, or without a repository where none may be created.

    Raises:
        SandboxFailure: A command failed.
        TaskError: The task's interpreter does not run.
    """
    if task.repository is not None:
        archive = await asyncio.to_thread(_pack, task.repository)
        await _run_checked(sandbox, ["tar", "-xf", "-"], "copy the repository", stdin=archive)
    if task.python is not None:
        await _choose_python(task.python, sandbox)
    await write_files(task.files, sandbox)
    if task.setup_command:
        await _run_checked(sandbox, task.setup_command, "run the setup command")
    return await take_base_tree(sandbox, may_create=not has_own_files)


async def write_files(files: Mapping[str, str], sandbox: Sandbox) -> None:
    """Write files into the sandbox.

    Raises:
        SandboxFailure: One could not be written.
    """
    for path, content in files.items():
        try:
            await sandbox.write_file(path, content.encode())
        except OSError as error:
            raise SandboxFailure(f"The task's file {path} could not be written: {error}") from error


async def _choose_python(name: str, sandbox: Sandbox) -> None:
    """Put the folder of the task's interpreter first in the commands' PATH."""
    result = await sandbox.run([name, "-c", _PYTHON])
    folder, _, _ = result.stdout.partition("\n")
    if not result.succeeded or not folder:
        reason = (result.stderr or result.stdout).strip()[-500:]
        raise TaskError(
            f"The task's interpreter {name!r} does not run in the sandbox (exit code "
            f"{result.exit_code}): {reason} Use an image that has it, or name its folder in "
            "sandbox_options.readable."
        )
    sandbox.search_path = folder


async def _run_checked(
    sandbox: Sandbox, command: str | list[str], purpose: str, stdin: bytes | None = None
) -> None:
    result = await sandbox.run(command, stdin=stdin)
    if not result.succeeded:
        reason = (result.stderr or result.stdout).strip()[-500:]
        raise SandboxFailure(f"Could not {purpose} (exit code {result.exit_code}): {reason}")


def _pack(repository: str) -> bytes:
    """Return a directory as an archive.

    Raises:
        SandboxFailure: The directory is missing, may not be copied, or is too large.
    """
    try:
        root = check_root(repository)
    except OSError as error:
        raise SandboxFailure(f"The task's repository cannot be read: {error}") from error
    size = sum(path.lstat().st_size for path in _entries(root))
    if size > MAX_REPOSITORY_BYTES:
        raise SandboxFailure(
            f"The task's repository {root} has {size} bytes; at most {MAX_REPOSITORY_BYTES} are "
            "copied. Use an image that holds it."
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(root.iterdir()):
            archive.add(path, arcname=path.name)
    return packed.getvalue()


def _entries(root: Path) -> list[Path]:
    return [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
