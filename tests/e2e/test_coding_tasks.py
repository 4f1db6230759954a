"""Coding tasks through `rollout run`: work in sandboxes, rewarded by the tests' verdict."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures.command_line import CommandLine
from fixtures.fake_kubernetes import FakeKubernetes
from fixtures.function_rows import ROWS, answer_to
from fixtures.sandboxes import require_kind
from fixtures.scripted_model import (
    Message,
    Messages,
    call_tool,
    question_of,
    scripted_model,
    turn_of,
)

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("some_sandbox"),
    pytest.mark.skipif(shutil.which("git") is None, reason="a coding task's diff needs git"),
]

N_TASKS = 7
TESTS = """
import unittest

from shop.prices import total


class Prices(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([1, 2]), {expected})
"""
PRICES = """FEE = {fee}


def total(prices):
    return sum(prices) - 1
"""
TEST_COMMAND = "python3 -m unittest discover -q -s tests -t ."
#: How the scripted policy goes about a task, by the task's number: the others repair it.
NO_REPAIR, FORGERS, WANDERERS = (3,), (4,), (6,)


def task(number: int) -> dict[str, Any]:
    """A small repository whose test fails: the fee of each task is its own number."""
    tests = TESTS.format(expected=3 + number)
    return {
        "id": number,
        "prompt": f"Task {number}: total() in shop/prices.py must add the fee {number} once.",
        "files": {
            "shop/__init__.py": "",
            "shop/prices.py": PRICES.format(fee=number),
            "tests/__init__.py": "",
            "tests/test_prices.py": tests,
        },
        "test_command": TEST_COMMAND,
        "test_files": {"tests/test_prices.py": tests},
    }


def policy(messages: Messages) -> str | Message:
    """Look, run the tests, repair, run them again, finish; some tasks are not repaired."""
    question = question_of(messages)
    number = int(question.removeprefix("Task ").partition(":")[0])
    turn = turn_of(messages)
    run_tests = call_tool("bash_executor", {"command": TEST_COMMAND}, f"call_{turn}")
    if number in WANDERERS:
        return run_tests
    steps = [
        call_tool("file_editor", {"command": "view", "path": "shop/prices.py"}, f"call_{turn}"),
        run_tests,
        edit(number, turn),
        run_tests,
        call_tool("finish", {"answer": f"{number} is done."}, f"call_{turn}"),
    ]
    return steps[turn]


def edit(number: int, turn: int) -> Message:
    if number in NO_REPAIR:
        return call_tool("search", {"pattern": "total"}, f"call_{turn}")
    if number in FORGERS:
        forged = {"command": "sed -i 's/assertEqual.*/assertTrue(True)/' tests/test_prices.py"}
        return call_tool("bash_executor", forged, f"call_{turn}")
    repair = {"command": "str_replace", "path": "shop/prices.py", "old_str": "- 1"}
    return call_tool("file_editor", {**repair, "new_str": "+ FEE"}, f"call_{turn}")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def exported(rollout: CommandLine, run: str) -> list[dict[str, Any]]:
    rollout("export", run, "--to", "jsonl", "-o", f"{run}.out.jsonl")
    lines = (rollout.folder / f"{run}.out.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_coding_tasks_in_parallel_are_rewarded_by_their_tests(rollout, folder):
    tasks = [task(number) for number in range(N_TASKS)]
    unjudged = {name: tasks[1][name] for name in ("prompt", "files")} | {"id": N_TASKS}
    write_rows(folder / "tasks.jsonl", [*tasks, unjudged])
    with scripted_model(policy) as model:
        shown = rollout.json(
            *("run", "tasks.jsonl", "--run", "shop", "--agent", "coding", "--max-steps", "16"),
            *("--base-url", model.base_url, "--concurrency", str(N_TASKS), "--workers", "1"),
            timeout_s=180,
        )
    assert model.errors == Counter()
    assert shown["rollouts"]["succeeded"] == N_TASKS + 1
    assert shown["errors"] == {}
    assert shown["reward"]["n"] == N_TASKS
    repaired = set(range(N_TASKS)).difference(NO_REPAIR, FORGERS, WANDERERS)
    assert shown["reward"]["mean"] == pytest.approx(len(repaired) / N_TASKS)
    lines = {line["prompt"]["id"]: line for line in exported(rollout, "shop")}
    assert lines.pop(N_TASKS)["reward"] is None
    for number, line in lines.items():
        good = number in repaired
        assert line["reward"] == float(good), number
        assert line["stop_reason"] == ("max_steps" if number in WANDERERS else "answered")
        told = [str(m["content"]) for m in line["messages"] if m["role"] == "tool"]
        assert "FAILED" in told[0 if number in WANDERERS else 1], (number, told)
        seemed_good = good or number in FORGERS
        assert told[-2].rstrip().endswith("OK") is seemed_good, (number, told)


async def test_tasks_are_worked_on_in_a_pod_each(rollout, folder):
    pytest.importorskip("kubernetes")
    require_kind("bubblewrap")
    numbers = (0, NO_REPAIR[0], FORGERS[0], *WANDERERS)
    write_rows(folder / "tasks.jsonl", [task(number) for number in numbers])
    config = {"sandbox": "k8s", "image": "python:3.12", "repository_path": "/workspace"}
    async with FakeKubernetes() as fake:
        with scripted_model(policy) as model:
            shown = await asyncio.to_thread(
                rollout.json,
                *("run", "tasks.jsonl", "--agent", "swe", "--base-url", model.base_url),
                *("--set", f"agent_config={json.dumps(config)}", "--workers", "1"),
                *("--max-steps", "16"),
                environment={"KUBECONFIG": fake.kubeconfig(folder)},
                timeout_s=180,
            )
        assert len(set(fake.deleted)) == 2 * 4  # one for the work, one for the verdict
        assert not fake.pods
    assert shown["rollouts"]["succeeded"] == 4
    assert shown["reward"]["mean"] == pytest.approx(1 / 4)


def test_twenty_function_completions_are_rewarded_by_their_unit_tests(rollout, folder):
    write_rows(folder / "functions.jsonl", [row.columns for row in ROWS])
    with scripted_model(lambda messages: answer_to(question_of(messages))) as model:
        shown = rollout.json(
            *("run", "functions.jsonl", "--run", "functions", "--reward", "python_tests"),
            *("--set", 'reward_config={"timeout_s": 1.5}'),
            *("--base-url", model.base_url, "--concurrency", "20", "--workers", "1"),
            timeout_s=180,
        )
    assert shown["rollouts"]["succeeded"] == len(ROWS) == 20
    assert shown["errors"] == {}
    rewards = {
        line["prompt"]["entry_point"]: line["reward"] for line in exported(rollout, "functions")
    }
    assert rewards == {row.name: float(row.is_correct) for row in ROWS}
