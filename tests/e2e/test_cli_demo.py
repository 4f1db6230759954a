"""The demo: everything is seen to work, and nothing of it is left, however it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from fixtures.command_line import CommandLine, processes_of
from fixtures.fork_server import NO_FORKS
from fixtures.waiting import wait_until


@pytest.fixture
def demo(folder: Path):
    """The command line with a temporary folder of its own, in which all of the demo lies."""
    # Here the processes are started as they are for users.
    command_line = CommandLine(folder, TMPDIR=str(folder), **{NO_FORKS: "1"})
    yield command_line
    command_line.close()


def left_behind(folder: Path) -> list[str]:
    files = [path.name for path in folder.iterdir() if not path.name.startswith((".out", ".err"))]
    return files + processes_of(folder)


def test_the_demo_shows_retries_and_error_rollouts_and_leaves_nothing(demo, folder):
    started = time.monotonic()
    shown = demo.json("demo")
    assert time.monotonic() - started < 60
    assert shown["state"] == "finished"
    assert shown["rollouts"]["total"] == 256
    assert shown["rollouts"]["succeeded"] + shown["rollouts"]["failed"] == 256
    assert shown["rollouts"]["failed"] == shown["errors"]["model_bad_request"] > 0
    assert shown["retries"] == shown["attempts"] - 256 > 10
    assert shown["groups"]["ready"] + shown["groups"]["dropped"] == 64
    assert 0.5 < shown["reward"]["mean"] < 1
    assert shown["pass"]["@1"] < shown["pass"]["@4"]
    assert left_behind(folder) == []


def test_the_demo_ignores_settings_and_says_what_to_try_next(demo, folder):
    (folder / "rollout.toml").write_text("[database]\nurl = 'postgresql://nobody@nowhere/x'\n")
    done = demo(
        *("demo", "--prompts", "4"),
        environment={"ROLLOUT_BROKER__PREFIX": "x", "OPENAI_BASE_URL": "http://nowhere/v1"},
    )
    for words in ("16: ", "pass@1", "pass@4", "rollouts/s", "would pull", "rollout run"):
        assert words in done.out
    assert "\x1b" not in done.out + done.err
    (folder / "rollout.toml").unlink()
    assert left_behind(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(demo, folder, number):
    running = demo.start("demo", "--prompts", "2000")
    wait_until(lambda: "Enqueued" in running.err, 60, seen=lambda: running.err)
    assert running.end(number).code == 130
    assert left_behind(folder) == []


def test_a_demo_whose_worker_dies_fails_and_leaves_nothing(demo, folder):
    running = demo.start("demo", "--prompts", "2000", "--json")
    wait_until(lambda: "Enqueued" in running.err, 60, seen=lambda: running.err)
    ours = [line for line in processes_of(folder) if "-m rollout " in line]
    (worker,) = [line for line in ours if " worker " in line]
    os.kill(int(worker.partition(":")[0]), signal.SIGKILL)
    done = running.end()
    assert (done.code, done.document["error"]["code"]) == (6, "E220")
    assert left_behind(folder) == []


def test_a_killed_demo_leaves_nothing(demo, folder):
    running = demo.start("demo", "--prompts", "2000")
    wait_until(lambda: "Enqueued" in running.err, 60, seen=lambda: running.err)
    running.end(signal.SIGKILL)
    wait_until(lambda: not left_behind(folder), 60, seen=lambda: left_behind(folder))
