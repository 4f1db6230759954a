"""Runs that fail say so: by their exit code, with the reason, and with the way to go on."""

from __future__ import annotations

import time

import pytest
from fixtures.command_line import questions

#: Raises while the folder holds the file `broken`.
FRAGILE = """
from pathlib import Path
from workers.core.registry import register_agent

@register_agent("fragile")
async def fragile(prompt, llm):
    if Path("broken").exists():
        raise RuntimeError("It is broken.")
    return prompt["answer"]
"""


@pytest.fixture
def run_fragile(folder, offline_policy) -> tuple[str, ...]:
    """A run whose rollouts all fail until `broken` is removed."""
    (folder / "fragile.py").write_text(FRAGILE)
    (folder / "broken").touch()
    questions(folder / "many.jsonl", 30)
    questions(folder / "few.jsonl", 3)
    return (
        *("--agent", "fragile", "--plugin", "fragile.py", "--max-attempts", "1", "--json"),
        *("--base-url", offline_policy(), "--set", "max_in_flight=10"),
    )


def test_a_run_whose_first_rollouts_all_fail_pauses_and_can_go_on(rollout, folder, run_fragile):
    done = rollout.call("run", "many.jsonl", "--run", "bad", *run_fragile)
    assert done.code == 4
    assert done.document["state"] == "paused"
    reason = done.document["state_reason"]
    assert reason.startswith("all of the first 20 rollouts failed, most often by agent_bug")
    assert done.document["rollouts"]["queued"] > 0
    assert f"it is paused because {reason}" in done.err
    assert "rollout errors bad" in done.err
    (folder / "broken").unlink()
    assert "rollout retry bad" in done.err
    retried = rollout("retry", "bad", "--yes").out
    assert "rollout continue bad" in retried
    assert "rollout resume bad" in done.err
    assert rollout.json("resume", "bad", "--plugin", "fragile.py")["rollouts"]["succeeded"] == 30


def test_a_small_run_that_failed_ends_with_4_and_a_higher_bound_with_0(rollout, run_fragile):
    done = rollout.call("run", "few.jsonl", "--run", "few", *run_fragile)
    assert (done.code, done.document["state"]) == (4, "finished")
    assert "3 of 3 rollouts failed" in done.err
    assert rollout.call("watch", "few").code == 4
    allowed = ("--run", "allowed", "--max-error-rate", "1")
    assert rollout.json("run", "few.jsonl", *allowed, *run_fragile)["rollouts"]["failed"] == 3
    assert rollout.call("watch", "allowed").code == 0


def test_a_run_given_up_waiting_for_says_that_its_processes_are_stopped(
    rollout, folder, offline_policy
):
    questions(folder / "sums.jsonl", 2)
    base_url = offline_policy("--latency-ms", "60000")
    run = ("run", "sums.jsonl", "--run", "sums", "--base-url", base_url, "--wait-timeout", "1")
    began = time.monotonic()
    done = rollout.call(*run, "--json", environment={"ROLLOUT_WORKER__DRAIN_S": "0"})
    assert time.monotonic() - began < 25, "a process had to be killed"
    assert (done.code, done.document["error"]["code"]) == (5, "E140")
    told = done.document["error"]["remedy"]
    assert told.endswith("is stopped. Go on with it: rollout resume sums")
    assert "goes on" not in told
    assert rollout.json("ps")["processes"] == []
