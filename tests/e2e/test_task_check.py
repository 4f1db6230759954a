"""`rollout task check` on sound and unsound coding tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fixtures.command_line import CommandLine
from fixtures.small_library import slug_task

pytestmark = [
    pytest.mark.usefixtures("some_sandbox"),
    pytest.mark.skipif(shutil.which("git") is None, reason="a coding task's diff needs git"),
]


def test_each_task_is_checked_without_a_model(bare_rollout: CommandLine, folder: Path) -> None:
    passes = slug_task("unittest", id="passes untouched")
    passes["files"]["tests/test_slugs.py"] = (
        "import unittest\nclass Nothing(unittest.TestCase):\n    def test(self):\n        pass\n"
    )
    wrong = slug_task("unittest", id="wrong gold patch")
    wrong["gold_patch"] = wrong["gold_patch"].replace("+    return", "+    return not")
    tasks = [
        slug_task("unittest", id="sound"),
        slug_task("unittest", id="without gold patch", gold_patch=None),
        passes,
        slug_task("unittest", id="does not start", test_command="no-such-runner"),
        wrong,
        {"id": "no tests", "prompt": "Do it."},
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    done = bare_rollout.call("task", "check", "tasks.jsonl", "--json")
    found = {row["task"]: row for row in done.document["tasks"]}
    seen = {
        name: (row["starts"], row["untouched_fails"], row["gold_passes"])
        for name, row in found.items()
    }
    assert seen == {
        "sound": (True, True, True),
        "without gold patch": (True, True, None),
        "passes untouched": (True, False, True),
        "does not start": (False, None, None),
        "wrong gold patch": (True, True, False),
        "no tests": (False, None, None),
    }
    problems = {name: row["problem"] for name, row in found.items()}
    assert not problems["sound"]
    assert not problems["without gold patch"]
    assert "did not start its tests" in problems["does not start"]
    assert "The gold patch fails: tests failed" in problems["wrong gold patch"]
    assert (done.code, done.document["ok"]) == (2, False)


def test_sound_tasks_end_with_0_and_a_table(bare_rollout: CommandLine, folder: Path) -> None:
    (folder / "tasks.jsonl").write_text(json.dumps(slug_task("unittest", id="sound")) + "\n")
    done = bare_rollout.call("task", "check", "tasks.jsonl")
    assert done.code == 0, done
    assert "1 tasks, 0 with a problem." in done.out
    refused = bare_rollout.call("task", "check", "tasks.jsonl", "--agent", "react")
    assert refused.code == 2
    assert "has no tasks with tests" in refused.err
