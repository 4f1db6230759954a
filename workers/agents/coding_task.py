"""A coding task in a sandbox: its files are written, its diff is read, its tests are run.

Used by the coding agents before and after the model's work. All steps are commands in the sandbox,
so they are the same for a local sandbox, a container and a pod. A failing command of this module is
a `SandboxFailure`, never a result of the model's work.
"""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from workers.sandbox.base import CommandResult, Sandbox, SandboxFailure
from workers.sandbox.workspace import check_root

MAX_REPOSITORY_BYTES = 512 * 1024**2
MAX_OUTPUT_CHARS = 8000
_NOT_FOUND = 127
_EXCLUDED_FROM_DIFF = ("__pycache__/**", "*.pyc", ".pytest_cache/**", "node_modules/**")
_GIT = (
    "git -c safe.directory='*' -c user.name=task -c user.email=task@localhost "
    "-c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false"
)


@dataclass(frozen=True)
class CodingTask:
    """The files and commands of one task.

    Args:
        files: Path to content, written before the work begins.
        repository: A local directory that is copied in before the files; for a container that has
            a repository already, None.
        setup_command: Run once before the work begins; its changes do not belong to the diff.
        test_command: Exit code 0 is a pass; None gives no reward.
        test_files: Path to content, written before the tests run; existing files are replaced.
        restored_paths: Paths restored to their first state before the tests run.
        test_timeout_s: Longest run of the tests; after it they have failed.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    repository: str | None = None
    setup_command: str | None = None
    test_command: str | None = None
    test_files: Mapping[str, str] = field(default_factory=dict)
    restored_paths: Sequence[str] = ()
    test_timeout_s: float = 600.0

    @classmethod
    def from_prompt(cls, prompt: Mapping[str, Any], defaults: Mapping[str, Any]) -> CodingTask:
        """Take the fields that a prompt has, else those of the agent's options.

        Raises:
            ValueError: A field is not of its type.
        """
        given = {
            name: prompt[name] if prompt.get(name) is not None else defaults.get(name)
            for name in cls.__dataclass_fields__
        }
        given = {name: value for name, value in given.items() if value is not None}
        try:
            return _CODING_TASK.validate_python(given)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field_path = ".".join(map(str, problem["loc"]))
            raise ValueError(f"the task's {field_path} is wrong: {problem['msg']}") from None


_CODING_TASK = TypeAdapter(CodingTask)


@dataclass(frozen=True)
class TestVerdict:
    """The result of the task's tests."""

    __test__ = False  # pytest takes classes named Test... for test cases

    passed: bool
    exit_code: int
    timed_out: bool
    output: str


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
    """
    if task.repository is not None:
        archive = await asyncio.to_thread(_pack, task.repository)
        await _checked(sandbox, ["tar", "-xf", "-"], "copy the repository", stdin=archive)
    await write_files(task.files, sandbox)
    if task.setup_command:
        await _checked(sandbox, task.setup_command, "run the setup command")
    return await _base_tree(sandbox, may_create=not has_own_files)


async def read_diff(sandbox: Sandbox, base_tree: str) -> str:
    """Return all changes since the base, new files included, as `git apply` takes them.

    The diff is empty if nothing changed, or if the model destroyed the repository.
    """
    diff = f"{_GIT} diff --cached --binary --no-color --no-ext-diff {base_tree}"
    result = await sandbox.run(f"{_staged(base_tree)} && {diff}")
    return result.stdout if result.succeeded and not result.truncated else ""


async def run_tests(task: CodingTask, sandbox: Sandbox, base_tree: str | None) -> TestVerdict:
    """Put the task's own tests in place and run them.

    Raises:
        SandboxFailure: The sandbox died, or the tests could not be put in place.
    """
    if task.restored_paths and base_tree is not None:
        paths = " ".join(map(shlex.quote, task.restored_paths))
        command = f"rm -rf -- {paths} && {_GIT} checkout {base_tree} -- {paths}"
        if not (await sandbox.run(command)).succeeded:
            # This fails only if the model destroyed the repository, so the tests have failed.
            return TestVerdict(False, 1, False, "the tests could not be restored")
    await write_files(task.test_files, sandbox)
    result = await sandbox.run(task.test_command or "true", timeout_s=task.test_timeout_s)
    return TestVerdict(
        result.succeeded,
        result.exit_code,
        result.timed_out,
        f"{result.stdout}{result.stderr}"[-MAX_OUTPUT_CHARS:],
    )


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


async def _base_tree(sandbox: Sandbox, *, may_create: bool) -> str | None:
    """Return the present state as a git tree; creates a repository where there is none."""
    inside = await sandbox.run(f"{_GIT} rev-parse --show-toplevel")
    if inside.exit_code == _NOT_FOUND or (not inside.succeeded and not may_create):
        return None
    if not inside.succeeded:
        create = f"{_GIT} init -q && {_GIT} add -A && {_GIT} commit -q --allow-empty -m base"
        await _checked(sandbox, create, "create a repository")
    tree = await _checked(sandbox, f"{_staged('HEAD')} && {_GIT} write-tree", "read its state")
    return tree.stdout.strip()


def _staged(base: str) -> str:
    """Return the command that stages the present state in a separate index.

    The model's own index is neither read nor changed, even in the middle of a merge.
    """
    excluded = " ".join(shlex.quote(f":(exclude,glob)**/{path}") for path in _EXCLUDED_FROM_DIFF)
    return (
        "GIT_INDEX_FILE=$(mktemp -d)/index && export GIT_INDEX_FILE && "
        f"{_GIT} read-tree {base} && {_GIT} add -A -- . {excluded}"
    )


async def _checked(
    sandbox: Sandbox, command: str | list[str], purpose: str, stdin: bytes | None = None
) -> CommandResult:
    result = await sandbox.run(command, stdin=stdin)
    if not result.succeeded:
        reason = (result.stderr or result.stdout).strip()[-500:]
        raise SandboxFailure(f"Could not {purpose} (exit code {result.exit_code}): {reason}")
    return result


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
