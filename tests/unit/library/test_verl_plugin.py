"""The library under verl's names; `make test-verl` has the same with verl itself."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

#: As verl does at its own import, for the entry points of its group.
VERL = "import importlib\nimportlib.import_module('workers.verl.plugin')\n"
SCRIPT = """
import sys
import verl
assert not [name for name in sys.modules if name == "workers.agentic_rollout"]
from verl.workers.rollout.agentic_rollout import AgenticRollout
from verl.workers.rollout import AgenticRollout as Again, BaseRollout
import verl.workers.rollout.other
import workers.agentic_rollout as ours
assert AgenticRollout is Again is ours.AgenticRollout
assert verl.workers.rollout.agentic_rollout is ours
assert (ours.__name__, ours.__spec__.name) == ("workers.agentic_rollout",) * 2
"""


def make_verl(folder: Path) -> Path:
    rollout = folder / "verl" / "workers" / "rollout"
    rollout.mkdir(parents=True)
    (folder / "verl" / "__init__.py").write_text(VERL)
    (folder / "verl" / "workers" / "__init__.py").touch()
    (rollout / "__init__.py").write_text("class BaseRollout: ...\n")
    (rollout / "other.py").touch()
    return rollout


def run(script: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_verl_finds_the_library_under_its_own_names(tmp_path: Path) -> None:
    make_verl(tmp_path)
    run(SCRIPT, tmp_path)


def test_what_verl_has_itself_is_left_alone(tmp_path: Path) -> None:
    rollout = make_verl(tmp_path)
    (rollout / "agentic_rollout.py").write_text("AgenticRollout = 'its own'\n")
    (rollout / "__init__.py").write_text("AgenticRollout = 'its own'\n")
    run(
        "import verl\n"
        "from verl.workers.rollout.agentic_rollout import AgenticRollout\n"
        "from verl.workers.rollout import AgenticRollout as Again\n"
        "assert AgenticRollout == Again == 'its own'\n",
        tmp_path,
    )


def test_the_package_is_a_plug_in_of_verl() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"agentic_rollout": "workers.verl.plugin"}
