"""Classes of optional packages, imported where they are installed.

Where the package is missing, a stand-in takes the class's place: modules that derive from it stay
importable, and making an object raises an error that names the extra. Must not: install anything.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional(extra: str, module: str, name: str) -> Any:
    """Return a class of an optional package, or its stand-in.

    Args:
        extra: The extra of `rollout-pipeline` that installs the package.
        module: The class's module.
        name: The class's name.
    """
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        return _stand_in(extra, error)


def _stand_in(extra: str, cause: ModuleNotFoundError) -> Any:
    class Missing:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise ModuleNotFoundError(
                f"{cause}. It comes with an extra: pip install 'rollout-pipeline[{extra}]'",
                name=cause.name,
            ) from cause

    return Missing
