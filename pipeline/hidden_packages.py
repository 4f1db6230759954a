"""Finds files that hide our packages from an import.

Python imports the first `workers` on its path: the script's folder, then PYTHONPATH, then installed
packages. A user's own `workers/` or `pipeline.py` therefore hides ours. Called by `rollout doctor`,
and by the command line when an import fails. Must not import the packages.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from pipeline.contract.errors import ConfigError

PACKAGES = ("pipeline", "producers", "rollout", "workers")

_INSTALLED = Path(__file__).resolve().parents[1]


def find_hidden(folder: Path | None = None) -> dict[str, Path]:
    """Map each hidden package to the file or folder that is imported in its place.

    Args:
        folder: The folder of a script; None: for this process.
    """
    path = [*([str(folder)] if folder else []), *sys.path]
    found = {name: _place(name, path) for name in PACKAGES}
    return {
        name: place
        for name, place in found.items()
        if place is not None and place.resolve() != _INSTALLED / name
    }


def explain_hidden(error: ImportError) -> ConfigError | None:
    """Return an error that names the file, if a hidden package made an import fail."""
    package = (error.name or "").partition(".")[0]
    place = find_hidden().get(package)
    if place is None:
        return None
    return ConfigError(
        f"{place} hides the package `{package}` of rollout-pipeline.",
        why=f"{error}.",
        remedy=f"Rename it, or take {place.parent} out of PYTHONPATH.",
        code="E143",
    )


def _place(name: str, path: list[str]) -> Path | None:
    spec = PathFinder.find_spec(name, path)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or name)
