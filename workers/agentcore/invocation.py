"""The configuration of the invocation that the current context serves.

`app.py` sets it for the entrypoint's context; models read it, so one that was made at import still
calls the endpoint that the invocation names. Must not: keep anything after the invocation.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

_rollout: ContextVar[Mapping[str, Any] | None] = ContextVar("rollout", default=None)


def enter_rollout(config: Mapping[str, Any]) -> None:
    """Set the fields of `_rollout`, and of `_training` before it, that this context serves."""
    _rollout.set(config)


def rollout_config() -> Mapping[str, Any]:
    """Return the fields of the current invocation; empty outside of one."""
    return _rollout.get() or {}
