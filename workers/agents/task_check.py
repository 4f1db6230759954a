"""Checks a coding task without a model: its tests fail untouched and pass with the gold patch.

Called by `rollout task check`. Must not: call a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.agents.coding_agent import CodingAgent
from workers.agents.coding_task import CodingTask
from workers.agents.coding_verdict import TestVerdict, not_started, run_on_clean_copy
from workers.agents.task_diff import DiffRefused
from workers.sandbox.base import SandboxFailure
from workers.sandbox.shared import SandboxSettings


@dataclass(frozen=True)
class TaskCheck:
    """The findings about one task.

    Args:
        starts: Whether the sandbox opens, the task is set up, and the test command starts.
        untouched_fails: Whether the tests fail without a change; None if they do not start.
        gold_passes: Whether they pass with the gold patch; None without one.
        problem: The part of the task to correct; empty if the task is good.
        python: Version and path of the interpreter; empty without a record.
    """

    starts: bool
    untouched_fails: bool | None = None
    gold_passes: bool | None = None
    problem: str = ""
    python: str = ""


async def check_tasks(
    prompts: Sequence[Mapping[str, Any]], agent: CodingAgent, at_once: int
) -> list[TaskCheck]:
    """Check tasks, at most `at_once` at a time; the results are in their order."""
    slots = asyncio.Semaphore(at_once)

    async def check_one(prompt: Mapping[str, Any]) -> TaskCheck:
        async with slots:
            return await check_task(prompt, agent)

    return await asyncio.gather(*map(check_one, prompts))


async def check_task(prompt: Mapping[str, Any], agent: CodingAgent) -> TaskCheck:
    """Check one task in the sandbox of an agent's options.

    Where the tests start only with the gold patch, the untouched task counts as failing.
    """
    try:
        task = CodingTask.from_prompt(prompt, agent.config)
        if not task.test_command:
            return TaskCheck(False, problem="The task has no test_command.")
        return await _check(task, agent.settings_for(prompt))
    except (SandboxFailure, ValueError) as error:
        return TaskCheck(False, problem=str(error))


async def _check(task: CodingTask, settings: SandboxSettings) -> TaskCheck:
    gold = await _gold_verdict(task, settings)
    run, _, _ = await run_on_clean_copy(task, b"", settings)
    if not run.has_started and not (gold and gold.passed):
        raise not_started(task, run, "on a clean copy of the task")
    untouched = run.verdict(task, ())
    problem = ""
    if untouched.passed:
        problem = "The tests pass without any change, so every rollout earns 1."
    elif gold and not gold.passed:
        left_out = f" Left out: {', '.join(gold.left_out)}." if gold.left_out else ""
        problem = f"The gold patch fails: {gold.reason}.{left_out} {gold.output.strip()[-300:]}"
    return TaskCheck(
        starts=True,
        untouched_fails=not untouched.passed,
        gold_passes=gold and gold.passed,
        problem=problem.strip(),
        python=untouched.python,
    )


async def _gold_verdict(task: CodingTask, settings: SandboxSettings) -> TestVerdict | None:
    if not task.gold_patch:
        return None
    try:
        run, changed, left_out = await run_on_clean_copy(task, task.gold_patch.encode(), settings)
    except DiffRefused as refusal:
        return TestVerdict(False, str(refusal))
    if not run.has_started:
        raise not_started(task, run, "with the gold patch")
    return run.verdict(task, changed, left_out)
