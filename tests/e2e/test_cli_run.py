"""`rollout run` on a bare machine: private servers, interruptions, and going on after them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from fixtures.command_line import CommandLine, Running, outcome_of, processes_of, questions
from fixtures.listeners import tcp_listeners
from fixtures.waiting import wait_until
from sqlalchemy import Engine, text

from pipeline.store.engine import READY_CHANNEL

REACT = ("--agent", "react", "--tools", "calculator", "--reward", "numeric")


def rollout_processes(folder: Path) -> list[str]:
    return [line for line in processes_of(folder) if "-m rollout " in line]


def wait_under_way(engine: Engine, running: Running, n: int = 3) -> None:
    """Wait until some rollouts of a run are done and others are not."""

    def some_done() -> bool:
        assert running.process.poll() is None, running.out + running.err
        return count(engine, "succeeded") >= n

    wait_until(some_done, 60, seen=lambda: running.err)


def count(engine: Engine, state: str) -> int:
    """Count the rollouts in a state."""
    query = text("SELECT count(*) FROM rollouts WHERE state = :state")
    with engine.connect() as connection:
        return connection.execute(query, {"state": state}).scalar_one()


@pytest.fixture
def slow(offline_policy) -> str:
    """A stand-in that answers late, so that a run can be interrupted."""
    return offline_policy("--latency-ms", "400")


def test_a_run_ends_with_its_status_and_its_processes(bare_rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 8)
    base_url = offline_policy()
    ran = ("run", "sums.jsonl", "--run", "sums", "-n", "3", *REACT, "--base-url", base_url)
    shown = bare_rollout.json(*ran)
    assert shown["run"] == "sums"
    assert shown["state"] == "finished"
    assert shown["rollouts"]["succeeded"] == 24
    assert shown["groups"]["ready"] == 8
    assert shown["reward"] == {
        "n": 24,
        "mean": 1.0,
        "std": 0.0,
        "stderr": 0.0,
        "prompts": 8,
    }
    assert outcome_of(shown) == outcome_of(bare_rollout.json("status", "sums"))
    assert rollout_processes(folder) == []
    _same_again_adds_nothing(bare_rollout, ran)
    _servers_stay_until_down(bare_rollout, folder)


def _same_again_adds_nothing(rollout: CommandLine, ran: tuple[str, ...]) -> None:
    added = rollout.json("submit", *ran[1:])
    assert added == {"run": "sums", "prompts": 8, "rollouts": 24, "added": 0}
    assert list(added) == ["run", "prompts", "rollouts", "added"]
    assert rollout.json(*ran)["attempts"] == 24
    assert rollout.error("submit", *ran[1:], "--max-steps", "3") == (7, "E130")


def _servers_stay_until_down(rollout: CommandLine, folder: Path) -> None:
    running = {each["name"]: each["running"] for each in rollout.json("ps")["services"]}
    assert running == {"postgres": True, "redis": True}
    assert rollout.json("down", "--dry-run")["services"] == ["postgres", "redis"]
    assert rollout.json("down")["services"] == ["postgres", "redis"]
    assert processes_of(folder), "the stand-in for the model is none of its"
    assert not [line for line in processes_of(folder) if "postgres" in line or "redis" in line]
    assert rollout.json("status", "@last")["rollouts"]["succeeded"] == 24


def test_ctrl_c_drains_and_resume_finishes_the_run(rollout, folder, slow, engine):
    questions(folder / "sums.jsonl", 40)
    arguments = ("run", "sums.jsonl", "--run", "sums", "-n", "2", *REACT, "--base-url", slow)
    running = rollout.start(*arguments, "--concurrency", "8", "--json")
    wait_under_way(engine, running)
    done = running.end(signal.SIGINT)
    assert done.code == 130
    assert "rollout resume sums" in done.err
    assert rollout_processes(folder) == []
    half = rollout.json("status", "sums")
    assert half["state"] == "active"
    assert half["rollouts"]["succeeded"] < 80
    final = rollout.json("resume", "sums", "--concurrency", "40")
    assert final["rollouts"]["succeeded"] == 80
    # What was drained had finished; nothing was executed twice.
    assert final["attempts"] == 80


def test_a_second_ctrl_c_stops_at_once(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 4)
    base_url = offline_policy("--latency-ms", "60000")
    running = rollout.start("run", "sums.jsonl", "--run", "sums", "--base-url", base_url)
    wait_until(lambda: "worker@" in rollout.call("ps").out, 60, seen=lambda: running.err)
    running.send(signal.SIGINT)
    wait_until(lambda: "Stopping" in running.err, 20)
    done = running.end(signal.SIGINT)
    assert done.code == 130
    assert "Stopped at once" in done.err
    assert rollout_processes(folder) == []


def test_a_killed_run_takes_its_processes_along(rollout, folder, slow, engine):
    questions(folder / "sums.jsonl", 20)
    running = rollout.start(
        "run", "sums.jsonl", "--run", "sums", *REACT, "--base-url", slow, "--concurrency", "4"
    )
    wait_under_way(engine, running)
    running.end(signal.SIGKILL)
    wait_until(lambda: rollout_processes(folder) == [], 60, seen=lambda: rollout_processes(folder))
    final = rollout.json("resume", "sums", "--concurrency", "40")
    assert final["rollouts"]["succeeded"] == 20


def test_a_detached_run_goes_on_until_down(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 4)
    submitted = rollout.json(
        "run", "sums.jsonl", "--run", "sums", *REACT, "--base-url", offline_policy(), "--detach"
    )
    assert submitted == {"run": "sums", "prompts": 4, "rollouts": 4, "added": 4}
    assert rollout.json("watch", "sums", "--timeout-s", "60")["rollouts"]["succeeded"] == 4
    kinds = sorted(each["kind"] for each in rollout.json("ps")["processes"])
    assert kinds == ["controller", "worker"]
    assert len(rollout.json("down", "--yes")["processes"]) == 2
    assert rollout_processes(folder) == []


def listens(engine: Engine) -> bool:
    """Whether somebody waits for a run on this database."""
    query = text(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE :listen"
    )
    with engine.connect() as connection:
        return bool(connection.execute(query, {"listen": f"listen%{READY_CHANNEL}%"}).all())


def test_ctrl_c_while_watching_only_stops_watching(rollout, folder, offline_policy, engine):
    questions(folder / "sums.jsonl", 2)
    base_url = offline_policy("--latency-ms", "60000")
    run = ("run", "sums.jsonl", "--run", "sums", "--base-url", base_url, "--detach")
    rollout(*run, environment={"ROLLOUT_WORKER__DRAIN_S": "0"})
    watching = rollout.start("watch", "sums")
    wait_until(lambda: count(engine, "running"), 60)
    wait_until(lambda: listens(engine), 60, seen=lambda: watching.err)
    done = watching.end(signal.SIGINT)
    assert done.code == 130
    assert "rollout watch sums" in done.err
    assert rollout.json("status", "sums")["state"] == "active"
    done = rollout.call("watch", "sums", "--timeout-s", "0.1", "--json")
    assert (done.code, done.document["error"]["code"]) == (5, "E140")
    rollout.json("cancel", "sums", "--yes")
    assert rollout.json("watch", "sums")["rollouts"]["cancelled"] == 2


def test_up_starts_what_is_missing_and_nothing_twice(bare_rollout, folder, offline_policy):
    started = bare_rollout.json("up", "--workers", "1")
    assert set(started["urls"]) == {
        "ROLLOUT_DATA_DIR",
        "ROLLOUT_DATABASE__URL",
        "ROLLOUT_BROKER__URL",
    }
    pids = {each["pid"] for each in started["processes"]}
    assert [address for pid in pids for address in tcp_listeners(pid)] == [], "nothing listens"
    assert {each["pid"] for each in bare_rollout.json("up", "--workers", "1")["processes"]} == pids
    questions(folder / "sums.jsonl", 3)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    base_url = offline_policy()
    # The printed variables are all that another process needs.
    other = CommandLine(elsewhere, **started["urls"])
    other("submit", "../sums.jsonl", "--run", "sums", *REACT, "--base-url", base_url)
    assert other.json("watch", "sums", "--timeout-s", "60")["rollouts"]["succeeded"] == 3


def test_a_controller_of_other_servers_is_not_taken_for_ones_own(
    rollout, folder, servers, offline_policy
):
    questions(folder / "sums.jsonl", 1)
    rollout.json("up", "--workers", "0")
    elsewhere = {
        "ROLLOUT_DATABASE__URL": servers.create_database(),
        "ROLLOUT_BROKER__PREFIX": f"other-{folder.name}",
    }
    run = ("run", "sums.jsonl", "--run", "sums", *REACT, "--base-url", offline_policy())
    shown = rollout.json(*run, "--wait-timeout", "60", environment=elsewhere)
    assert shown["rollouts"]["succeeded"] == 1
    rollout.json("down", "--yes")
    servers.drop_database(elsewhere["ROLLOUT_DATABASE__URL"])


def test_a_foreign_process_with_a_noted_pid_is_left_alone(bare_rollout, folder):
    notes = folder / ".rollout" / "processes"
    notes.mkdir(parents=True)
    note = {
        "kind": "worker",
        "pid": os.getpid(),
        "mark": "another boot:1",
        "stays": True,
        "log": "worker.log",
        "started_at": "2020-01-01T00:00:00Z",
    }
    (notes / f"worker-{os.getpid()}.json").write_text(json.dumps(note))
    assert bare_rollout.json("ps")["processes"] == []
    assert bare_rollout.json("down", "--yes")["processes"] == []


def test_what_cannot_work_is_said_before_anything_is_started(bare_rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 1)
    base_url = offline_policy()
    nowhere = "http://127.0.0.1:9/v1"
    assert bare_rollout.error("run", "sums.jsonl") == (3, "E103")
    assert bare_rollout.error("run", "sums.jsonl", "--base-url", nowhere) == (6, "E204")
    run = ("run", "sums.jsonl", "--base-url", base_url)
    assert bare_rollout.error(*run, "--agent", "reacct") == (2, "E107")
    assert bare_rollout.error(*run, "--tools", "calculater") == (2, "E107")
    assert bare_rollout.error(*run, "--reward", "nmeric") == (2, "E107")
    assert bare_rollout.error(*run, "--plugin", "missing.py") == (3, "E101")
    assert bare_rollout.error(*run, "--set", "limitz=1") == (2, "E106")
    assert bare_rollout.error(*run, "--set", "agent_config.max_stpes=1") == (2, "E106")
    assert bare_rollout.error("run", "nothing.jsonl", "--base-url", base_url) == (2, "E111")
    nowhere = {"ROLLOUT_BROKER__URL": "carrier-pigeon://loft"}
    assert bare_rollout.error("up", environment=nowhere) == (3, "E101")
    assert not (folder / ".rollout").exists()


def test_too_many_errors_are_exit_code_4(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 30)
    base_url = offline_policy("--mishaps", "1", "--stall-s", "0")
    done = rollout.call(
        *("run", "sums.jsonl", "--run", "sums", "-n", "2", *REACT, "--base-url", base_url),
        *("--max-error-rate", "0.01", "--max-attempts", "1", "--set", "max_in_flight=4", "--json"),
    )
    assert done.code == 4
    assert done.document["state"] == "paused"
    assert any("allowed are 1%" in sentence for sentence in done.document["waits"])
    assert done.document["rollouts"]["failed"] > 0
    assert done.document["rollouts"]["queued"] > 0
    assert "rollout errors sums" in done.err


def test_agents_rewards_and_tools_of_ones_own_run(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 2)
    (folder / "mine.py").write_text(
        "from workers.core.registry import register_agent\n"
        "from workers.rewards.registry import register_reward\n"
        "@register_agent('echo')\n"
        "async def echo(prompt, llm):\n"
        "    return prompt['answer']\n"
        "@register_reward('half')\n"
        "def half(response, answer):\n"
        "    return 0.5 * (response == answer)\n"
    )
    run = ("run", "sums.jsonl", "--base-url", offline_policy(), "--plugin", "mine.py")
    # Workers that are here already know nothing of it.
    rollout("up")
    mine = (*run, "--agent", "echo", "--reward", "half")
    shown = rollout.json(*mine)
    assert (shown["reward"]["n"], shown["reward"]["mean"]) == (2, 0.5)
    assert shown["run"].startswith("sums-")
    again = rollout.json(*mine, "--run", shown["run"])
    assert (again["attempts"], again["reward"]) == (2, shown["reward"])


def test_a_run_hands_out_no_rollouts_of_another_that_was_left(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 2)
    run = ("run", "sums.jsonl", *REACT, "--base-url", offline_policy(), "--run")
    rollout("submit", *run[1:], "left", "--queue", "nobody")
    assert rollout.json(*run, "mine")["rollouts"]["succeeded"] == 2
    assert rollout.json("status", "left")["rollouts"]["queued"] == 2
    # The workers of a local run are those of its queue.
    assert rollout.json("resume", "left")["rollouts"]["succeeded"] == 2


def test_bad_rows_are_put_aside_on_demand(rollout, folder):
    good = json.dumps({"question": "1 + 1?", "answer": "2"})
    (folder / "rows.jsonl").write_text(f"{good}\nnot json\n{good}\n")
    assert rollout.error("submit", "rows.jsonl", "--run", "rows") == (2, "E114")
    shown = rollout.json("submit", "rows.jsonl", "--run", "rows", "--skip-bad")
    assert shown == {"run": "rows", "prompts": 2, "rollouts": 2, "added": 2, "skipped": 1}
    (aside,) = (folder / ".rollout" / "bad-rows" / "rows.jsonl").read_text().splitlines()
    assert json.loads(aside)["location"] == "rows.jsonl:2"


GOOD_ROW = '{"question": "1 + 1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("command", "rows", "options", "code"),
    [
        ("run", f"{GOOD_ROW}not json\n", (), "E114"),
        ("submit", f"{GOOD_ROW}not json\n", (), "E114"),
        ("submit", GOOD_ROW, ("--prompt-field", "ask"), "E115"),
        ("submit", "", (), "E113"),
        ("submit", None, (), "E111"),
    ],
    ids=["bad row of run", "bad row", "wrong field", "no rows", "no file"],
)
def test_a_dataset_that_cannot_be_read_leaves_no_run(
    rollout, folder, offline_policy, command, rows, options, code
):
    if rows is not None:
        (folder / "rows.jsonl").write_text(rows)
    rollout("db", "upgrade")
    asked = (command, "rows.jsonl", "--run", "rows", "--base-url", offline_policy(), *options)
    done = rollout.call(*asked, "--json")
    assert (done.code, json.loads(done.out)["error"]["code"]) == (2, code)
    assert rollout.json("runs")["runs"] == []
