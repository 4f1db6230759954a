"""Help answers at once, in plain text where nobody looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from fixtures.command_line import CommandLine

HEAVY = (
    "openai",
    "anthropic",
    "datasets",
    "boto3",
    "mcp",
    "kubernetes",
    "torch",
    "celery",
    "kombu",
    "sqlalchemy",
    "pydantic",
    "rich",
)


def test_help_loads_nothing_heavy(folder):
    code = (
        "import sys; from pipeline.cli.app import run_command; code = run_command(['--help']);"
        f"print(code, *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr.split() == ["0"]
    assert "offline-policy" in done.stdout


def test_help_takes_less_than_two_fifths_of_a_second(folder):
    def once() -> float:
        started, before = time.monotonic(), os.times()
        subprocess.run(
            [sys.executable, "-m", "pipeline.cli", "--help"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = os.times()
        cpu = after.children_user + after.children_system
        cpu -= before.children_user + before.children_system
        # On a busy machine the wall clock measures the others.
        return min(time.monotonic() - started, cpu)

    assert min(once() for _ in range(3)) < 0.4


@pytest.mark.parametrize("command", [(), ("run",), ("show", "rollout"), ("db", "upgrade")])
def test_help_in_a_pipe_has_no_control_codes(folder, command):
    rollout = CommandLine(folder, FORCE_COLOR="1", GITHUB_ACTIONS="true", TERM="xterm-256color")
    shown = rollout(*command, "--help")
    assert "\x1b" not in shown.out + shown.err
    assert "Usage: rollout" in shown.out
