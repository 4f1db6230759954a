"""Flower, as `rollout flower` starts it: readable tasks, a password, nothing to be changed."""

from __future__ import annotations

import base64
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, questions, servers_of
from fixtures.waiting import wait_until

REACT = ("--agent", "react", "--tools", "calculator", "--reward", "numeric")


def ask(flower: dict[str, Any], path: str, *, data: bytes | None = None, password: str = "") -> str:
    request = urllib.request.Request(flower["url"] + path, data=data)
    login = f"{flower['user']}:{password or flower['password']}"
    request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def refused(flower: dict[str, Any], path: str, **options: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(flower, path, **options)
    with error.value as answer:
        return answer.code


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_flower_lists_tasks_with_readable_ids_arguments_and_results(
    kind: str,
    request: pytest.FixtureRequest,
    folder: Path,
    database_url: str,
    offline_policy,
):
    place: BrokerPlace = request.getfixturevalue(f"{kind}_place")
    rollout = CommandLine(folder, **servers_of(database_url, place))
    try:
        _look(rollout, folder, offline_policy)
    finally:
        rollout.close()


def _look(rollout: CommandLine, folder: Path, offline_policy) -> None:
    running = rollout.start("flower", "--port", "0", "--json")
    flower = running.ready()
    assert flower["url"].startswith("http://127.0.0.1:")
    rollout.start("controller", "--json").ready()
    rollout.start("worker", "--json").ready()
    wait_until(lambda: json.loads(ask(flower, "/api/workers?refresh=1")), 60)
    questions(folder / "sums.jsonl", 2)
    base_url = offline_policy()
    rollout("submit", "sums.jsonl", "--run", "sums", "-n", "2", *REACT, "--base-url", base_url)

    def finished() -> dict[str, Any]:
        tasks = json.loads(ask(flower, "/api/tasks"))
        done = {name: task for name, task in tasks.items() if task["state"] == "SUCCESS"}
        return done if len(done) == 4 else {}

    tasks = wait_until(finished, 60, seen=lambda: ask(flower, "/api/tasks"))
    assert set(tasks) == {f"sums-g{group:06d}-r{index}-a1" for group in (0, 1) for index in (0, 1)}
    task = tasks["sums-g000001-r1-a1"]
    assert task["name"] == "rollout.run"
    assert task["args"] == "run=sums group=g000001 rollout=2/2 policy=0"
    assert task["kwargs"] == ""
    assert task["result"].strip("'").startswith("reward=1 turns=")
    assert task["worker"].startswith("worker@")
    page = ask(flower, "/tasks")
    for column in ("Name", "UUID", "State", "args", "Result", "Runtime", "Worker"):
        assert column in page
    _only_looking_is_allowed(flower)
    assert running.end(signal.SIGTERM).code == 0


def _only_looking_is_allowed(flower: dict[str, Any]) -> None:
    assert refused(flower, "/api/tasks", password="wrong") == 401
    worker = next(iter(json.loads(ask(flower, "/api/workers"))))
    assert refused(flower, f"/api/worker/shutdown/{worker}", data=b"") in (401, 403, 405)
    assert refused(flower, "/api/task/send-task/rollout.run", data=b"{}") in (401, 403, 405)


def test_a_password_of_ones_own_is_not_printed(rollout):
    running = rollout.start(
        "flower", "--port", "0", "--json", environment={"ROLLOUT_FLOWER__PASSWORD": "hush"}
    )
    flower = running.ready()
    assert "password" not in flower
    assert json.loads(ask(flower, "/api/tasks", password="hush")) == {}
    done = running.end(signal.SIGINT)
    assert done.code == 0
    assert "hush" not in done.out + done.err


def test_with_sqs_flower_is_refused_with_the_reason(folder, database_url, sqs_place):
    rollout = CommandLine(folder, **servers_of(database_url, sqs_place))
    assert rollout.error("flower") == (7, "E132")
