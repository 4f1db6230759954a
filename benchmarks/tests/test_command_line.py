"""The command line: its commands, and the default command."""

import subprocess
import sys

import pytest

from benchmarks import goals
from benchmarks.__main__ import Part, app, main
from benchmarks.mock_server import ROOT

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"python -m benchmarks {command}" in capsys.readouterr().out


def test_without_a_command_the_goals_are_measured():
    command = [sys.executable, "-m", "benchmarks", "store", "--pairs", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "python -m benchmarks goals" in done.stderr


def test_every_part_that_can_be_measured_can_be_named():
    assert {*Part} == {"loops", *goals.PARTS, "store"}
