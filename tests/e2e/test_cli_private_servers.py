"""Private servers and commands that only read: used where they run, else started and stopped."""

from __future__ import annotations

import signal
from pathlib import Path

from fixtures.command_line import CommandLine, processes_of, questions
from fixtures.waiting import wait_until


def running(rollout: CommandLine) -> set[str]:
    return {each["name"] for each in rollout.json("ps")["services"] if each["running"]}


def submitted(rollout: CommandLine, folder: Path) -> None:
    questions(folder / "sums.jsonl", 2)
    rollout("submit", "sums.jsonl", "--run", "sums", "--reward", "numeric")


def test_reading_after_down_leaves_nothing_running(bare_rollout, folder):
    submitted(bare_rollout, folder)
    bare_rollout("up", "--workers", "0")
    bare_rollout("down", "--yes")
    for command in (("runs",), ("status", "sums"), ("show", "run", "sums"), ("db", "check")):
        done = bare_rollout(*command)
        assert "runs for this command only" in done.err
        assert processes_of(folder) == []
    assert "sums" in bare_rollout("runs").out
    assert bare_rollout.json("limits", "show") == []
    assert bare_rollout.error("status", "nobody") == (2, "E120")
    assert processes_of(folder) == []


def test_reading_beside_up_says_nothing_and_stops_nothing(bare_rollout, folder):
    submitted(bare_rollout, folder)
    bare_rollout("up", "--workers", "0")
    assert bare_rollout("runs").err == ""
    assert running(bare_rollout) == {"postgres", "redis"}


def test_up_keeps_the_server_of_a_command_that_still_reads(bare_rollout, folder):
    submitted(bare_rollout, folder)
    watch = bare_rollout.start("watch", "sums")
    wait_until(lambda: "runs for this command only" in watch.err, 60)
    bare_rollout("up", "--workers", "0")
    assert watch.end(signal.SIGINT).code == 130
    assert running(bare_rollout) == {"postgres", "redis"}


def test_a_reading_command_that_is_told_to_end_stops_its_server(bare_rollout, folder):
    submitted(bare_rollout, folder)
    watch = bare_rollout.start("watch", "sums")
    wait_until(lambda: "postgres" in running(bare_rollout) and "queued" in watch.err, 60)
    assert watch.end(signal.SIGTERM).code == 128 + signal.SIGTERM
    assert processes_of(folder) == []
