"""Chooses and opens a sandbox by the name of its kind.

Called by the tools, the rewards and the agents; the only module that knows every kind. Must not
fall back from a kind that was asked for by name: only `auto` may choose.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from typing import Any, Literal, get_args

from workers.sandbox.base import Sandbox, SandboxFailure, SandboxLimits
from workers.sandbox.bubblewrap import BubblewrapSandbox, probe
from workers.sandbox.process import ProcessSandbox

SandboxKind = Literal["auto", "bubblewrap", "process", "docker", "k8s"]

_log = logging.getLogger(__name__)


async def open_sandbox(
    kind: SandboxKind = "auto",
    *,
    root: str | os.PathLike[str] | None = None,
    limits: SandboxLimits | None = None,
    **options: Any,
) -> Sandbox:
    """Open a sandbox; close it, or use it as an async context manager.

    Args:
        kind: `auto` is bubblewrap where it runs, and otherwise processes with a warning.
        root: Directory to work in, which must exist; None makes one for as long as the sandbox is
            open. For `docker` and `k8s` it is a path inside the container.
        limits: What a command may use.
        **options: `readable` for bubblewrap; the arguments of `DockerSandbox.start` or
            `KubernetesSandbox.start`.

    Raises:
        SandboxFailure: It would not start; the message says why and what to do.
        ValueError: No such kind.
    """
    limits = limits or SandboxLimits()
    if kind not in get_args(SandboxKind):
        known = ", ".join(get_args(SandboxKind))
        raise ValueError(f"Unknown sandbox kind: {kind}. Known: {known}.")
    if kind == "docker":
        from workers.sandbox.docker_container import DockerSandbox

        return await DockerSandbox.start(root=_inner_root(root), limits=limits, **options)
    if kind == "k8s":
        from workers.sandbox.kubernetes_pod import KubernetesSandbox

        return await KubernetesSandbox.start(root=_inner_root(root), limits=limits, **options)
    # A large directory takes a while to lend.
    return await asyncio.to_thread(_open_local, kind, root, limits, **options)


def _open_local(
    kind: str,
    root: str | os.PathLike[str] | None,
    limits: SandboxLimits,
    *,
    readable: tuple[str, ...] = (),
) -> Sandbox:
    reason = "" if kind == "process" else probe()
    if reason and kind == "bubblewrap":
        raise SandboxFailure(
            f"The sandbox would not start: bubblewrap does not run here ({reason}). Install the "
            "package bubblewrap and allow user namespaces, or choose another kind of sandbox."
        )
    if reason:
        _warn_once(reason)
    if kind == "process" or reason:
        return ProcessSandbox(root, limits)
    return BubblewrapSandbox(root, limits, readable)


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning(
        "Sandboxed commands run with process limits only, because bubblewrap does not run here "
        "(%s): they are bounded, but they have the network and can read this machine's files. "
        "Install the package bubblewrap and allow user namespaces before running untrusted code.",
        reason,
    )


def _inner_root(root: str | os.PathLike[str] | None) -> str:
    return "/workspace" if root is None else os.fspath(root)
