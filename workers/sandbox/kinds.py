"""Chooses the kind of a sandbox and opens the sandbox.

Called by the tools, the rewards, the agents and `rollout doctor`; the only module that knows every
kind. Must not replace a kind that was asked for by name, and must not choose a kind that leaves
commands unconfined.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from workers.sandbox.base import Sandbox, SandboxFailure, SandboxLimits
from workers.sandbox.bubblewrap import BubblewrapSandbox
from workers.sandbox.local import ConfinedSandbox, LocalSandbox
from workers.sandbox.namespaces import NamespacesSandbox
from workers.sandbox.process import ProcessSandbox

LocalKind = Literal["auto", "bubblewrap", "namespaces", "process"]
SandboxKind = LocalKind | Literal["docker", "k8s"]
#: The kinds that run elsewhere than on this machine's file system.
CONTAINER_KINDS = ("docker", "k8s")
KINDS = (*get_args(LocalKind), *CONTAINER_KINDS)

#: The kinds that confine, best first, with the program that each needs.
_CONFINING: dict[str, tuple[type[ConfinedSandbox], str]] = {
    "bubblewrap": (BubblewrapSandbox, "bwrap"),
    "namespaces": (NamespacesSandbox, "unshare"),
}
#: A kind that failed is tried again after this time: the machine may have been out of memory.
_RETRY_S = 60.0
#: Longest wait for the first, trivial command of a kind of sandbox.
_PROBE_S = 20.0

_REMEDY = (
    "Install the package bubblewrap and allow user namespaces, choose docker or k8s, or accept "
    'unconfined commands with sandbox = "process" (setting worker.sandbox, or `sandbox` in the '
    "run's agent_config or reward_config)."
)
_CONFINED = "no network, a read-only system, one writable folder, no sight of other processes"
_CONFINED_IN_PART = (
    "in part: a user of their own and limits, but the network and all that every user may read"
)

_log = logging.getLogger(__name__)
_default_kind: LocalKind = "auto"
_obstacles: dict[str, tuple[str, float]] = {}


@dataclass(frozen=True, slots=True)
class LocalChoice:
    """The kind that `auto` stands for on this machine.

    Args:
        kind: The kind of sandbox; None: commands are refused.
        confines: A description of the confinement, for people.
        obstacles: Kind to the reason why it does not run here, for better kinds.
    """

    kind: str | None
    confines: str
    obstacles: dict[str, str]


def set_default_kind(kind: LocalKind) -> None:
    """Set the kind that `auto` stands for in this process: the worker's setting."""
    global _default_kind
    _default_kind = kind


async def open_sandbox(
    kind: SandboxKind = "auto",
    *,
    root: str | os.PathLike[str] | None = None,
    limits: SandboxLimits | None = None,
    **options: Any,
) -> Sandbox:
    """Open a sandbox; close it, or use it as an async context manager.

    Args:
        kind: `auto` is the kind of `set_default_kind`, or else of `choose_local`.
        root: Directory to work in, which must exist; None makes one for as long as the sandbox is
            open. For `docker` and `k8s` it is a path inside the container.
        limits: Limits of a command.
        **options: `readable` for bubblewrap and namespaces; the arguments of
            `DockerSandbox.start` or `KubernetesSandbox.start`.

    Raises:
        SandboxFailure: The sandbox would not start, or no kind here confines its commands; the
            message gives the reason and the remedy.
        ValueError: No such kind.
    """
    limits = limits or SandboxLimits()
    if kind == "auto":
        kind = _default_kind
    if kind not in KINDS:
        raise ValueError(f"Unknown sandbox kind: {kind}. Known: {', '.join(KINDS)}.")
    if kind == "docker":
        from workers.sandbox.docker_container import DockerSandbox

        return await DockerSandbox.start(root=_inner_root(root), limits=limits, **options)
    if kind == "k8s":
        from workers.sandbox.kubernetes_pod import KubernetesSandbox

        return await KubernetesSandbox.start(root=_inner_root(root), limits=limits, **options)
    # Changing the owner of a large directory takes a while.
    return await asyncio.to_thread(_open_local, kind, root, limits, **options)


def choose_local() -> LocalChoice:
    """Find the best kind that runs on this machine.

    The order is bubblewrap, namespaces, and as root `process`, which confines in part. For other
    users `process` does not count: its commands would run as the worker's own user.
    """
    obstacles: dict[str, str] = {}
    for kind in _CONFINING:
        if not (reason := obstacle_of(kind)):
            return LocalChoice(kind, _CONFINED, obstacles)
        obstacles[kind] = reason
    if os.geteuid() == 0:
        return LocalChoice("process", _CONFINED_IN_PART, obstacles)
    return LocalChoice(None, "nothing: commands are refused", obstacles)


def obstacle_of(kind: str) -> str:
    """Return why a confining kind of sandbox does not run on this machine; empty if it does.

    A kind is tried once; one that fails is tried again after a minute.
    """
    reason, tried_at = _obstacles.get(kind, ("", -_RETRY_S))
    if kind in _obstacles and (not reason or time.monotonic() < tried_at + _RETRY_S):
        return reason
    _, program = _CONFINING[kind]
    if shutil.which(program) is None:
        reason = f"the program {program} is not installed"
    else:
        reason = _probe(kind)
    _obstacles[kind] = (reason, time.monotonic())
    return reason


def _probe(kind: str) -> str:
    """Run `true` in a sandbox of this kind; return why that fails, empty if it does not."""
    with tempfile.TemporaryDirectory(prefix="rollout-sandbox-probe-") as folder:
        try:
            sandbox = _CONFINING[kind][0](folder, SandboxLimits(), ())
            with contextlib.closing(sandbox.workspace):
                child = sandbox.child_of(["true"], ".", None)
                ended = subprocess.run(
                    [argument.replace("{status_fd}", "2") for argument in child.argv],
                    env=child.env,
                    cwd=child.cwd,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_PROBE_S,
                    check=False,
                )
        except (OSError, subprocess.TimeoutExpired, SandboxFailure) as error:
            return str(error)
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with {ended.returncode}"


def _open_local(
    kind: SandboxKind,
    root: str | os.PathLike[str] | None,
    limits: SandboxLimits,
    *,
    readable: tuple[str, ...] = (),
) -> LocalSandbox:
    chosen = _choose() if kind == "auto" else kind
    if chosen == "process":
        return ProcessSandbox(root, limits)
    if reason := obstacle_of(chosen):
        raise SandboxFailure(
            f"The sandbox would not start: {chosen} does not run here ({reason}). {_REMEDY}"
        )
    return _CONFINING[chosen][0](root, limits, readable)


def _choose() -> str:
    choice = choose_local()
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in choice.obstacles.items())
    if choice.kind is None:
        raise SandboxFailure(
            "The sandbox was refused: no kind of sandbox confines a model's commands here "
            f"({reasons}), and they would run with all rights of this user. {_REMEDY}"
        )
    if choice.kind == "process":
        _warn_once(reasons)
    return choice.kind


@functools.cache
def _warn_once(reasons: str) -> None:
    _log.warning(
        "Sandboxed commands are confined only in part (%s): they run as a user of their own, but "
        "have the network and can read what every user may read. Install the package bubblewrap "
        "before running untrusted code.",
        reasons,
    )


def _inner_root(root: str | os.PathLike[str] | None) -> str:
    return "/workspace" if root is None else os.fspath(root)
