"""User code: modules that register agents, tools and rewards when they are imported.

Loaded once, when a process starts, from its settings. A message can only name agents, tools and
rewards that are registered. Must not: load code that a message names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.contract.errors import ConfigError


def load_plugins(names: Sequence[str]) -> None:
    """Import modules by dotted name, or files by path.

    Raises:
        ConfigError: A plug-in cannot be imported; the message names it and the cause.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _load_file(Path(name))
            else:
                importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"The plug-in {name} could not be loaded.",
                why=f"{type(error).__name__}: {error}.",
                remedy="It is named in ROLLOUT_WORKER__PLUGINS (or --plugin): a module on the "
                "Python path, or the path of a .py file.",
            ) from error


def _load_file(path: Path) -> None:
    path = path.resolve()
    name = f"rollout_plugin_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
