"""The command line: its commands, and the default command."""

import subprocess
import sys

import pytest

from benchmarks import goals
from benchmarks.__main__ import Part
from benchmarks.mock_server import ROOT


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["goals", "limits", "pull", "soak", "scaling", "faults"])
def test_every_command_explains_itself(command):
    done = call(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python -m benchmarks {command}" in done.stdout


def test_without_a_command_the_goals_are_measured():
    done = call("store", "--pairs", "0")
    assert done.returncode == 2
    assert "python -m benchmarks goals" in done.stderr


def test_every_part_that_can_be_measured_can_be_named():
    assert {*Part} == {"loops", *goals.PARTS, "store"}
