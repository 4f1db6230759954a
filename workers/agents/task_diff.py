"""The diff of a coding task: its base, the changes since then, and their way onto a clean copy.

Used by `coding_task` and `coding_verdict`. Every step is a git command in a sandbox. The sandbox in
which the model worked may hold a repository that the model changed; only the one of the clean copy
is trusted. Must not: read or change the model's own index.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from workers.agents.protected_paths import folders_of, protected_paths
from workers.sandbox.base import Sandbox, SandboxFailure

#: A larger diff is not judged.
MAX_DIFF_BYTES = 16 * 1024**2
_NOT_FOUND = 127
_EXCLUDED = ("__pycache__/**", "*.pyc", ".pytest_cache/**", "node_modules/**", ".rollout-diff-*")
_GIT = (
    "git -c safe.directory='*' -c user.name=task -c user.email=task@localhost "
    "-c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false "
    "-c diff.noprefix=false -c diff.mnemonicPrefix=false"
)
_DIFF = "diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --relative"
_OWN_INDEX = "GIT_INDEX_FILE=$(mktemp -d)/index && export GIT_INDEX_FILE"


class DiffRefused(Exception):
    """A diff cannot be judged; the model's work is the cause, and the message gives the reason."""


@dataclass(frozen=True, slots=True)
class AppliedDiff:
    """The paths of a diff on a clean copy: those that count, and those that were left out."""

    changed: list[str]
    left_out: list[str]


async def take_base_tree(sandbox: Sandbox, *, may_create: bool) -> str | None:
    """Return the present state as a git tree; creates a repository where there is none.

    Returns:
        None without git, or without a repository where none may be created.

    Raises:
        SandboxFailure: A command failed.
    """
    create = f"{_GIT} init -q && {_GIT} add -A && {_GIT} commit -q --allow-empty -m base"
    # All steps are one command, because the start of a command costs more than git does.
    result = await sandbox.run(
        f"command -v git >/dev/null || exit {_NOT_FOUND}; "
        f"{_GIT} rev-parse --show-toplevel >/dev/null 2>&1 || "
        f"{{ {create if may_create else f'exit {_NOT_FOUND}'}; }} || exit; "
        f"{_staged('HEAD')} && {_GIT} write-tree"
    )
    if result.exit_code == _NOT_FOUND:
        return None
    if not result.succeeded:
        reason = (result.stderr or result.stdout).strip()[-500:]
        raise SandboxFailure(
            f"Could not take the task's first state (exit code {result.exit_code}): {reason}"
        )
    return result.stdout.strip()


async def read_diff(sandbox: Sandbox, base_tree: str) -> bytes:
    """Return all changes since the base, new files included, as `git apply` takes them.

    The diff is empty if nothing changed, or if the model destroyed the repository.

    Raises:
        DiffRefused: The diff is too large.
    """
    # The diff goes through a file, because the output of a command is cut.
    made = await sandbox.run(
        f"{_staged(base_tree)} && file=$(mktemp ./.rollout-diff-XXXXXX) && "
        f'{_GIT} {_DIFF} {base_tree} > "$file" && wc -c "$file"'
    )
    if not made.succeeded:
        return b""
    size, _, path = made.stdout.strip().partition(" ")
    try:
        # The size is checked before the read: a large diff would fill the worker's memory.
        if int(size) > MAX_DIFF_BYTES:
            raise DiffRefused(f"the diff has {size} bytes; at most {MAX_DIFF_BYTES} are judged")
        return await sandbox.read_file(path)
    except (OSError, ValueError) as error:
        raise DiffRefused(f"the diff cannot be read: {error}") from error
    finally:
        await sandbox.run(["rm", "-f", "--", path])


async def apply_diff(
    diff: bytes,
    sandbox: Sandbox,
    base_tree: str,
    *,
    allowed: Sequence[str] = (),
    task_paths: Sequence[str] = (),
) -> AppliedDiff:
    """Apply a diff to a clean copy, and undo it on the protected paths.

    Args:
        diff: The diff.
        sandbox: The clean copy.
        base_tree: Its base.
        allowed: As in `protected_paths`.
        task_paths: As in `protected_paths`.

    Raises:
        DiffRefused: The diff does not apply.
    """
    if not diff.strip():
        return AppliedDiff([], [])
    # `--index` also records files that a `.gitignore` of the diff itself would hide.
    applied = await sandbox.run(
        f"{_staged(base_tree)} && {_GIT} apply --index --whitespace=nowarn - && "
        f"{_GIT} diff --cached --name-status -z --no-renames --relative {base_tree}",
        stdin=diff,
    )
    if not applied.succeeded or applied.truncated:
        reason = applied.stderr.strip()[-500:] or "it changes too many files"
        raise DiffRefused(f"the diff does not apply to a clean copy: {reason}")
    fields = applied.stdout.split("\0")[:-1]
    status = dict(zip(fields[1::2], fields[::2], strict=True))
    new = {path for path, letter in status.items() if letter == "A"}
    left_out = protected_paths(
        list(status),
        new=new,
        known=await _known(folders_of(new), sandbox, base_tree),
        allowed=allowed,
        task_paths=task_paths,
    )
    await _undo(left_out, new, sandbox, base_tree)
    return AppliedDiff([path for path in status if path not in left_out], left_out)


async def restore(paths: Sequence[str], sandbox: Sandbox, base_tree: str) -> bool:
    """Put paths back to their first state; returns whether that was possible."""
    quoted = " ".join(map(shlex.quote, paths))
    command = f"rm -rf -- {quoted} && {_GIT} checkout {base_tree} -- {quoted}"
    return (await sandbox.run(command)).succeeded


async def _known(paths: Sequence[str], sandbox: Sandbox, base_tree: str) -> set[str]:
    """Return those of the paths that the base has."""
    if not paths:
        return set()
    listed = await sandbox.run(
        f"xargs -0 {_GIT} --literal-pathspecs ls-tree --name-only -z {base_tree} --",
        stdin=b"".join(path.encode() + b"\0" for path in paths),
    )
    return set(listed.stdout.split("\0"))


async def _undo(paths: Sequence[str], new: set[str], sandbox: Sandbox, base_tree: str) -> None:
    for command, undone in (
        ("rm -rf --", [path for path in paths if path in new]),
        (f"{_GIT} --literal-pathspecs checkout {base_tree} --", set(paths).difference(new)),
    ):
        names = b"".join(path.encode() + b"\0" for path in undone)
        if names and not (await sandbox.run(f"xargs -0 {command}", stdin=names)).succeeded:
            raise DiffRefused(f"protected paths could not be restored: {', '.join(undone)}"[:500])


def _staged(base: str) -> str:
    """Return the command that stages the present state in a separate index.

    The model's own index is neither read nor changed, even in the middle of a merge.
    """
    excluded = " ".join(shlex.quote(f":(exclude,glob)**/{path}") for path in _EXCLUDED)
    return f"{_OWN_INDEX} && {_GIT} read-tree {base} && {_GIT} add -A -- . {excluded}"
