"""Controller and workers as services of their own, with named servers, on more than one broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, Running, questions, servers_of
from fixtures.servers import PrivateServers
from fixtures.waiting import wait_until

REACT = ("--agent", "react", "--tools", "calculator", "--reward", "numeric")

#: A worker or a controller that is killed is missed soon.
QUICK = {
    "ROLLOUT_LEASE__HEARTBEAT_S": "0.5",
    "ROLLOUT_LEASE__LEASE_S": "3",
    "ROLLOUT_LEASE__GRACE_S": "1",
    "ROLLOUT_LEASE__POLL_S": "0.3",
    "ROLLOUT_WORKER__DRAIN_S": "5",
}


@pytest.fixture(params=["redis", "amqp"])
def services(
    request: pytest.FixtureRequest, folder: Path, database_url: str
) -> Iterator[CommandLine]:
    place: BrokerPlace = request.getfixturevalue(f"{request.param}_place")
    command_line = CommandLine(folder, **servers_of(database_url, place), **QUICK)
    yield command_line
    command_line.close()


def start(services: CommandLine, *arguments: str) -> Running:
    running = services.start(*arguments, "--json")
    running.ready()
    return running


def done_of(services: CommandLine, run: str) -> int:
    counted = services.json("status", run)["rollouts"]
    return counted["succeeded"] + counted["failed"]


def test_submit_work_pull_commit_and_export(services, folder, offline_policy):
    questions(folder / "sums.jsonl", 6)
    base_url = offline_policy("--wrong", "0.3")
    controller = start(services, "controller")
    worker = start(services, "worker", "-c", "20", "-Q", "rollouts")
    arguments = ("sums.jsonl", "--run", "sums", "-n", "3", *REACT, "--base-url", base_url)
    added = services.json("submit", *arguments)
    assert added == {"run": "sums", "prompts": 6, "rollouts": 18, "added": 6}
    final = services.json("watch", "sums", "--timeout-s", "60")
    assert final["rollouts"]["succeeded"] == 18
    assert services.json("submit", *arguments)["added"] == 0
    _pull_and_commit(services)
    _export(services, folder, final["reward"]["mean"])
    assert worker.end(signal.SIGTERM).code == 0
    assert controller.end(signal.SIGTERM).code == 0


def _pull_and_commit(services: CommandLine) -> None:
    def pull(step: int) -> dict[str, Any]:
        return services.json(
            "pull", "sums", "--consumer", "t", "--step", str(step), "--groups", "4"
        )

    first = pull(0)
    assert list(first) == ["step", "groups", "replayed"]
    assert (first["step"], len(first["groups"]), first["replayed"]) == (0, 4, False)
    group = first["groups"][0]
    assert list(group) == ["group_id", "prompt", "rollouts"]
    rollout = group["rollouts"][0]
    assert list(rollout) == ["rollout_id", "reward", "stop_reason", "messages"]
    assert rollout["messages"][-1]["role"] == "assistant"
    assert pull(0) == {**first, "replayed": True}
    rest = pull(1)
    seen = [group["group_id"] for batch in (first, rest) for group in batch["groups"]]
    assert len(seen) == len(set(seen)) == 6
    commit = ("commit", "sums", "--consumer", "t", "--step", "1")
    assert services.json(*commit) == {"run": "sums", "consumer": "t", "step": 1, "groups": 6}
    assert services.json(*commit)["groups"] == 0
    assert services.json("status", "sums")["groups"]["consumed"] == 6
    assert services.error("pull", "sums", "--consumer", "t", "--step", "2") == (5, "E141")


def _export(services: CommandLine, folder: Path, mean: float) -> None:
    told = services.json("export", "sums", "--to", "jsonl", "-o", "out.jsonl")
    assert (told["rollouts"], told["failed"]) == (18, 0)
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert sum(line["reward"] for line in lines) / 18 == pytest.approx(mean)
    piped = services("export", "sums", "-o", "-")
    assert piped.out == (folder / "out.jsonl").read_text()


def test_killed_services_lose_nothing(services, folder, offline_policy):
    questions(folder / "sums.jsonl", 30)
    base_url = offline_policy("--latency-ms", "150")
    controller = start(services, "controller")
    worker = start(services, "worker", "-c", "4")
    submit = ("submit", "sums.jsonl", "--run", "sums", "-n", "2", *REACT, "--base-url", base_url)
    services(*submit)
    wait_until(lambda: done_of(services, "sums") >= 5, 60)
    controller.end(signal.SIGKILL)
    worker.end(signal.SIGKILL)
    assert done_of(services, "sums") < 60
    start(services, "controller")
    start(services, "worker", "-c", "30")
    final = services.json("watch", "sums", "--timeout-s", "80")
    assert final["rollouts"]["succeeded"] == final["reward"]["n"] == 60
    assert final["reward"]["mean"] == 1.0
    assert final["groups"]["ready"] == 30
    services("export", "sums", "-o", "out.jsonl")
    lines = (folder / "out.jsonl").read_text().splitlines()
    ids = [json.loads(line)["rollout_id"] for line in lines]
    assert len(ids) == len(set(ids)) == 60


def test_failed_rollouts_are_seen_explained_and_retried(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 2)
    controller = start(rollout, "controller", "--only", "dispatcher", "--only", "collector")
    refusing = offline_policy("--mishaps", "1")
    rollout(
        "submit",
        "sums.jsonl",
        "--run",
        "bad",
        *REACT,
        "--model",
        "x",
        "--base-url",
        "http://10.0.0.1/v1",
    )
    # Only now: what a worker may not call is refused as soon as it has reported.
    start(rollout, "worker", "-c", "5")
    watched = rollout.call("watch", "bad", "--timeout-s", "60", "--json")
    assert (watched.code, watched.document["errors"]) == (4, {"model_bad_request": 2})
    (row,) = rollout.json("errors", "bad")["errors"]
    assert (row["code"], row["rollouts"]) == ("endpoint_not_allowed", 2)
    assert "ROLLOUT_WORKER__ALLOWED_BASE_URLS" in row["example"]["message"]
    shown = rollout.json("show", "rollout", "bad-g000001-r0")
    assert shown["state"] == "failed"
    assert shown["attempts"][0]["error"]["class"] == "model_bad_request"
    assert rollout.json("show", "group", "bad-g000001")["drop_reason"] == "failed"
    assert rollout.json("errors", "bad", "--by", "worker")["errors"][0]["errors"] == 2
    retry = ("retry", "bad", "--where", "group == 1")
    assert rollout.json(*retry, "--dry-run")["retried"] == 1
    assert rollout.error(*retry) == (7, "E131")
    assert rollout.json(*retry, "--yes")["retried"] == 1
    watched = rollout.call("watch", "bad", "--timeout-s", "60", "--json")
    assert watched.document["attempts"] == 3
    assert controller.end(signal.SIGINT).code == 0
    assert refusing


def test_a_paused_run_waits_and_a_cancelled_one_ends(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 2)
    rollout("submit", "sums.jsonl", "--run", "sums", *REACT, "--base-url", offline_policy())
    assert rollout.json("pause", "sums", "--reason", "lunch")["changed"]
    start(rollout, "controller")
    start(rollout, "worker")
    shown = rollout("status", "sums").out
    assert "It is paused because lunch" in shown
    assert rollout.json("status", "sums")["rollouts"]["queued"] == 2
    assert rollout.json("continue", "sums")["changed"]
    assert rollout.json("watch", "sums", "--timeout-s", "60")["rollouts"]["succeeded"] == 2
    assert rollout.json("cancel", "sums", "--yes")["cancelled"] == 0
    assert rollout.json("status", "sums")["state"] == "finished"


def test_runs_are_listed_newest_first_and_found_by_their_beginning(rollout, folder):
    questions(folder / "sums.jsonl", 1)
    for slug in ("alpha", "beta"):
        rollout("submit", "sums.jsonl", "--run", slug)
    assert [run["run"] for run in rollout.json("runs")["runs"]] == ["beta", "alpha"]
    assert rollout.json("status", "al")["run"] == "alpha"
    assert rollout.json("status")["run"] == rollout.json("status", "@last")["run"] == "beta"
    assert rollout.error("status", "gamma") == (2, "E120")


def test_a_named_database_is_migrated_by_its_owner(
    folder: Path, servers: PrivateServers, redis_place: BrokerPlace
):
    url = servers.create_database(migrated=False)
    rollout = CommandLine(folder, **servers_of(url, redis_place))
    assert rollout.error("status") == (3, "E102")
    assert rollout.error("db", "check") == (3, "E102")
    assert rollout.json("db", "current")["current"] is None
    upgraded = rollout.json("db", "upgrade")
    assert upgraded["current"] == upgraded["head"]
    assert rollout.json("db", "upgrade") == rollout.json("db", "check") == upgraded
    assert rollout.json("runs") == {"runs": []}
    servers.drop_database(url)


def test_servers_that_are_away_are_named_without_their_password(folder):
    rollout = CommandLine(
        folder,
        ROLLOUT_DATABASE__URL="postgresql://me:hush@127.0.0.1:9/x",
        ROLLOUT_BROKER__URL="redis://:hush@127.0.0.1:9/0",
    )
    done = rollout.call("status", "--json")
    assert (done.code, done.document["error"]["code"]) == (6, "E202")
    checked = rollout.call("doctor", "--json")
    assert checked.code == 6
    states = {check["name"]: check["status"] for check in checked.document["checks"]}
    assert (states["database"], states["broker"]) == ("failed", "failed")
    assert all(check["remedy"] for check in checked.document["checks"] if check["status"] != "ok")
    assert "hush" not in done.out + done.err + checked.out + checked.err


def test_the_doctor_finds_nothing_wrong_where_all_is_well(rollout, offline_policy):
    checked = rollout.call("doctor", "--json", environment={"OPENAI_BASE_URL": offline_policy()})
    assert checked.code == 0
    assert checked.document["ok"]
    states = {check["name"]: check["status"] for check in checked.document["checks"]}
    assert (
        states.items()
        >= {
            "database": "ok",
            "broker": "ok",
            "model endpoint": "ok",
            "token ids": "ok",
            "payloads": "ok",
        }.items()
    )


def test_a_file_that_hides_our_package_is_named(rollout, folder, offline_policy):
    (folder / "workers.py").write_text("")
    checked = rollout.call("doctor", "--json", environment={"OPENAI_BASE_URL": offline_policy()})
    (names,) = [check for check in checked.document["checks"] if check["name"] == "names"]
    assert (checked.code, names["status"]) == (0, "warning")
    assert f"`workers` by {folder}/workers.py" in names["detail"]
    # Started by `python -m`, as here, a command looks into its folder first.
    command = [sys.executable, "-m", "rollout", "worker"]
    done = subprocess.run(
        command, cwd=folder, env=rollout.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert f"E143 {folder}/workers.py hides the package `workers`" in done.stderr
