"""One sandbox for all tools of a trajectory, opened by the first tool that needs it.

Used by the tools that run commands or edit files, so that each tool sees the files of the others.
Tools with a configured directory share one sandbox on it for all trajectories. Must not close a
sandbox that a tool got as a setting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from workers.sandbox.base import Sandbox, SandboxLimits
from workers.sandbox.confined_folder import ConfinedFolder
from workers.sandbox.files import Files, LocalFiles, files_of
from workers.sandbox.kinds import CONTAINER_KINDS, SandboxKind, open_sandbox

#: Upper bounds of the timeout that a tool asks for.
_TOOL_LIMITS: dict[str, Any] = {"wall_s": 600.0, "cpu_s": 600.0}

#: Settings of a tool about its sandbox, with their types.
SANDBOX_OPTIONS: Mapping[str, Any] = {
    "sandbox": Any,
    "root": Any,
    "limits": get_type_hints(SandboxLimits),
    "options": dict[str, Any],
}

_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The sandbox that a tool asks for; tools with equal settings share one.

    Args:
        kind: As in `open_sandbox`.
        root: Directory to work in; None is a new one for each trajectory.
        limits: Limits of a command.
        options: Further arguments of `open_sandbox`.
        existing: An open sandbox to use, which its opener closes.
    """

    kind: SandboxKind = "auto"
    root: str | None = None
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    options: Mapping[str, Any] = field(default_factory=dict)
    existing: Sandbox | None = None

    @property
    def is_plain_folder(self) -> bool:
        """Whether the files are those of a directory of this machine, named in the settings."""
        return self.existing is None and self.kind not in CONTAINER_KINDS and self.root is not None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SandboxSettings:
        """Read the keys `sandbox` (a kind or an open sandbox), `root`, `limits` and `options`.

        Raises:
            ValueError: A limit of no such name.
        """
        sandbox = config.get("sandbox", "auto")
        limits = config.get("limits") or {}
        if not isinstance(limits, SandboxLimits):
            known = {limit.name for limit in fields(SandboxLimits)}
            if unknown := set(limits) - known:
                raise ValueError(
                    f"Unknown sandbox limits: {', '.join(sorted(unknown))}. "
                    f"Known: {', '.join(sorted(known))}."
                )
            limits = SandboxLimits(**(_TOOL_LIMITS | limits))
        is_kind = isinstance(sandbox, str)
        return cls(
            kind=sandbox if is_kind else "auto",  # type: ignore[arg-type]
            root=str(config["root"]) if config.get("root") else None,
            limits=limits,
            options=dict(config.get("options") or {}),
            existing=None if is_kind else sandbox,
        )

    async def open(self) -> Sandbox:
        """Open a new sandbox of these settings; its caller closes it.

        Raises:
            SandboxFailure: The sandbox would not start.
        """
        return await open_sandbox(
            self.kind, root=self.root, limits=self.limits, **dict(self.options)
        )


@dataclass(slots=True)
class _Share:
    """An open sandbox, and the tools with trajectories that use it."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None
    users: set[tuple[int, str]] = field(default_factory=set)


class SharedSandboxes:
    """The open sandboxes of a process, by trajectory and settings."""

    def __init__(self) -> None:
        self._shares: dict[_Key, _Share] = {}

    async def join(self, tool: object, instance_id: str, settings: SandboxSettings) -> Sandbox:
        """Return the sandbox of a trajectory, opening it for the first tool that asks.

        Raises:
            SandboxFailure: The sandbox would not start.
        """
        if settings.existing is not None:
            return settings.existing
        key = _key(instance_id, settings)
        share = self._shares.setdefault(key, _Share())
        share.users.add((id(tool), instance_id))
        async with share.opening:
            if share.sandbox is None:
                try:
                    share.sandbox = await settings.open()
                except BaseException:
                    await self._forget(key, share, tool, instance_id)
                    raise
            return share.sandbox

    async def leave(self, tool: object, instance_id: str, settings: SandboxSettings) -> None:
        """Note that a tool has finished a trajectory; after the last tool its sandbox is closed."""
        key = _key(instance_id, settings)
        share = self._shares.get(key)
        if share is not None:
            await self._forget(key, share, tool, instance_id)

    async def files(self, tool: object, instance_id: str, settings: SandboxSettings) -> Files:
        """Return the files of a trajectory; a directory named in the settings needs no sandbox."""
        if settings.is_plain_folder:
            return LocalFiles(ConfinedFolder(settings.root or ".", settings.limits.file_bytes))
        return files_of(await self.join(tool, instance_id, settings))

    async def _forget(self, key: _Key, share: _Share, tool: object, instance_id: str) -> None:
        share.users.discard((id(tool), instance_id))
        if not share.users and self._shares.get(key) is share:
            del self._shares[key]
            if share.sandbox is not None:
                await share.sandbox.close()


def _key(instance_id: str, settings: SandboxSettings) -> _Key:
    # A directory in a container is not shared: each trajectory has a container of its own.
    trajectory = "" if settings.is_plain_folder else instance_id
    options = repr(sorted(settings.options.items()))
    return (trajectory, settings.kind, settings.root, settings.limits, options)


#: The sandboxes of this process's tools.
SHARED = SharedSandboxes()
