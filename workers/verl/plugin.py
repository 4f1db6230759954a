"""The library under verl's names: `verl.workers.rollout.agentic_rollout` and its class.

verl imports this module at its own import, by the entry point group `verl.plugins`; the variable
`VERL_USE_EXTERNAL_PLUGINS=none` prevents that. Must not: import verl or torch, or replace a module
or a name that verl itself has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "verl.workers.rollout"
MODULE = f"{PACKAGE}.agentic_rollout"
OURS = "workers.agentic_rollout"


class _Alias(Loader):
    """Loads our module under verl's name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(OURS)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module was executed under its own name, and keeps its own spec.
        module.__spec__ = self._own_spec


class _WithOurClass(Loader):
    """Loads verl's package, which then has our class, too."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        if not hasattr(module, "AgenticRollout"):
            vars(module)["AgenticRollout"] = import_module(OURS).AgenticRollout


class AgenticRolloutFinder(MetaPathFinder):
    """Finds the two modules; every other one is left to the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load one of the two modules; None for any other."""
        if fullname not in (PACKAGE, MODULE):
            return None
        own: Any = PathFinder.find_spec(fullname, path, target)
        if fullname == MODULE:
            return own or ModuleSpec(MODULE, _Alias())
        if own is not None and own.loader is not None:
            own.loader = _WithOurClass(own.loader)
        return own


def install() -> None:
    """Let Python find the library under verl's names; a second call changes nothing."""
    if not any(isinstance(finder, AgenticRolloutFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AgenticRolloutFinder())


install()
