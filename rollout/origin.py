"""Where a run comes from: its dataset, its plug-ins, and the code that began it.

Used by `run` and `submit`. Only looks: nothing here may fail or hold up a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.contract.run import RunOrigin

#: Longest wait for git: a folder on a slow network must not hold up a run.
_GIT_S = 1.0


def origin_of(dataset: str, *, plugins: Sequence[str]) -> RunOrigin:
    """Return the origin of a run that is begun here and now."""
    from pipeline.contract.run import RunOrigin

    is_name = dataset.startswith("hf:")
    return RunOrigin(
        dataset=dataset if is_name else str(Path(dataset).expanduser().absolute()),
        plugins=tuple(plugins),
        version=_version(),
        commit=_commit(),
    )


def _version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rollout-pipeline")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the current folder, None where there is none or git is slow."""
    import subprocess

    command = ("git", "rev-parse", "--verify", "--quiet", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False, text=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
