"""Check that the coding agent repairs a small program in a sandbox, with its tests as reward.

    python examples/test_coding_agent.py

The answers always come from a script; exit code 1 if a check fails.
"""

from __future__ import annotations

import json
import sys

from scripted_policy import ScriptedPolicy, call_tool
from test_agentic_rollout import run

from workers.agents.coding_agent import CodingAgent
from workers.agents.swe_agent import SWEAgent

TESTS = """
import unittest

from prices import total


class Prices(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total([1, 2]), 3)
"""
TASK = {
    "content": "total() in prices.py adds one too many. Repair it.",
    "files": {
        "prices.py": "def total(prices):\n    return sum(prices) + 1\n",
        "test_prices.py": TESTS,
    },
    "test_command": "python3 -m unittest -q test_prices",
    "test_files": {"test_prices.py": TESTS},
}


def calls(*arguments: tuple[str, dict]) -> ScriptedPolicy:
    """Make a policy of these tool calls, one a turn."""
    replies = [
        call_tool(name, json.dumps(given), f"call_{number}")
        for number, (name, given) in enumerate(arguments)
    ]
    return ScriptedPolicy({"": replies})


RUN_TESTS = ("bash_executor", {"command": TASK["test_command"]})
REPAIR = (
    "file_editor",
    {"command": "str_replace", "path": "prices.py", "old_str": " + 1", "new_str": ""},
)
FINISH = ("finish", {"answer": "total() no longer adds one."})


async def the_coding_agent_repairs_the_program() -> bool:
    llm = calls(RUN_TESTS, REPAIR, RUN_TESTS, FINISH)
    trajectory = await CodingAgent().run_trajectory(TASK, llm, "coding")
    return trajectory.final_reward == 1.0 and trajectory.metadata["tests"]["passed"]


async def the_swe_agents_answer_is_a_diff() -> bool:
    trajectory = await SWEAgent().run_trajectory(TASK, calls(REPAIR, FINISH), "swe")
    return "-    return sum(prices) + 1" in trajectory.get_final_response()


async def rewritten_tests_do_not_count() -> bool:
    cheat = ("bash_executor", {"command": "echo pass > test_prices.py"})
    trajectory = await SWEAgent().run_trajectory(TASK, calls(cheat, FINISH), "cheat")
    return trajectory.final_reward == 0.0


CHECKS = (
    the_coding_agent_repairs_the_program,
    the_swe_agents_answer_is_a_diff,
    rewritten_tests_do_not_count,
)

if __name__ == "__main__":
    sys.exit(1 if run(CHECKS) else 0)
