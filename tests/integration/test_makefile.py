"""The Makefile creates `.venv` once, and again if its Python can no longer be used.

A shell script replaces Python, pip and venv: it records its calls, and installs nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$*" in
"-m venv --clear .venv")
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo venv >> asked ;;
"-m pip install "*) echo "pip $*" >> asked ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files that make reads, and the replacement of Python."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make_install(checkout: Path) -> tuple[str, list[str]]:
    """Return the output of `make install`, and its calls of Python."""
    asked = checkout / "asked"
    asked.write_text("")
    done = subprocess.run(
        ["make", "install", "PYTHON=./python"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, [line.split()[0] for line in asked.read_text().splitlines()]


def lose(python: Path) -> None:
    python.unlink()


def point_to_nowhere(python: Path) -> None:
    python.unlink()
    python.symlink_to("/nowhere/python3")


def become_useless(python: Path) -> None:
    """Replace Python by a program that fails the check, as one that is too old or without pip."""
    python.write_text("#!/bin/sh\nexit 1\n")


def test_the_environment_is_made_once(checkout: Path) -> None:
    assert make_install(checkout)[1] == ["venv", "pip"]
    assert make_install(checkout)[1] == []


def test_changed_requirements_are_installed_into_the_same_environment(checkout: Path) -> None:
    make_install(checkout)
    os.utime(checkout / ".venv/.installed", (0, 0))
    assert make_install(checkout)[1] == ["pip"]


@pytest.mark.parametrize("spoil", [lose, point_to_nowhere, become_useless])
def test_an_environment_that_cannot_be_used_is_made_anew(
    checkout: Path, spoil: Callable[[Path], None]
) -> None:
    make_install(checkout)
    spoil(checkout / ".venv/bin/python")
    said, asked = make_install(checkout)
    assert "The Python of .venv is missing, older than 3.11 or without pip." in said
    assert asked == ["venv", "pip"]
    assert make_install(checkout)[1] == []
