"""Flower, as `rollout flower` starts it: readable tasks, a password, nothing to be changed.

What it shows is so: failures are failures, and nothing is active of a worker that is gone.
"""

from __future__ import annotations

import base64
import json
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, Running, questions, servers_of
from fixtures.deployment import AGENTS
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


@pytest.fixture(params=["redis", "amqp"])
def on_each(
    request: pytest.FixtureRequest, folder: Path, database_url: str
) -> Iterator[CommandLine]:
    """Commands on each broker that Flower can watch."""
    place: BrokerPlace = request.getfixturevalue(f"{request.param}_place")
    rollout = CommandLine(folder, **servers_of(database_url, place))
    yield rollout
    rollout.close()


def test_flower_lists_tasks_with_readable_ids_arguments_and_results(
    on_each, folder: Path, offline_policy
):
    _look(on_each, folder, offline_policy)


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


_FAILING = """
from workers.core.registry import register_agent

@register_agent("failing")
async def failing(prompt, llm, config):
    raise ValueError("no such luck")
"""


class Watched:
    """A run of three prompts on one worker, and Flower beside it."""

    def __init__(self, rollout: CommandLine, agent: str, **environment: str) -> None:
        folder = rollout.folder
        (folder / "failing.py").write_text(_FAILING)
        plugins = json.dumps([str(AGENTS), str(folder / "failing.py")])
        environment = {
            "ROLLOUT_WORKER__PLUGINS": plugins,
            "ROLLOUT_LLM__BASE_URL": "http://127.0.0.1:9/v1",
            **environment,
        }
        self.gate = folder / "gate"
        started = rollout.start("flower", "--port", "0", "--json", environment=environment)
        controller = rollout.start("controller", "--json")
        self.worker: Running = rollout.start("worker", "--json", environment=environment)
        self.flower = started.ready()
        controller.ready()
        self.worker.ready()
        wait_until(self.workers, 30)
        questions(folder / "sums.jsonl", 3)
        rollout(
            *("submit", "sums.jsonl", "--run", "sums", "--agent", agent, "--max-attempts", "2"),
            *("--set", "backoff_base_s=0", "--set", f'agent_config={{"folder": "{folder}"}}'),
            environment=environment,
        )

    def tasks(self) -> dict[str, Any]:
        return json.loads(ask(self.flower, "/api/tasks"))

    def workers(self) -> list[dict[str, Any]]:
        return json.loads(ask(self.flower, "/workers?json=1"))["data"]

    def metric(self, name: str, *labels: str) -> float:
        """The sum of a metric's lines that hold these labels."""
        lines = [line for line in ask(self.flower, "/metrics").splitlines() if line[:1] != "#"]
        chosen = [
            line for line in lines if line.startswith(name) and all(x in line for x in labels)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in chosen)

    def wait_states(self, **expected: int) -> dict[str, Any]:
        """Wait until the tasks are in these states; return them."""

        def reached() -> dict[str, Any]:
            tasks = self.tasks()
            return tasks if Counter(task["state"] for task in tasks.values()) == expected else {}

        return wait_until(
            reached, 60, what=str(expected), seen=lambda: ask(self.flower, "/api/tasks")
        )

    def nothing_is_active(self) -> None:
        """The worker is gone, and Flower says so everywhere."""
        (worker,) = wait_until(
            lambda: [w for w in self.workers() if not w["active"] and not w["status"]],
            30,
            seen=self.workers,
        )
        assert worker["active"] == 0
        assert self.metric("flower_worker_number_of_currently_executing_tasks") == 0
        assert self.metric("flower_worker_online") == 0


def test_failed_attempts_are_failures_with_their_error_and_each_has_one_outcome(on_each):
    watched = Watched(on_each, "failing")
    tasks = watched.wait_states(FAILURE=6)
    assert set(tasks) == {f"sums-g{g:06d}-r0-a{a}" for g in range(3) for a in (1, 2)}
    task = tasks["sums-g000001-r0-a2"]
    assert task["exception"] == ("agent_bug code=agent_raised tokens=0: ValueError: no such luck")
    assert "ValueError: no such luck" in ask(watched.flower, "/task/sums-g000001-r0-a2")
    assert [worker["task-failed"] for worker in watched.workers()] == [6]
    assert watched.metric("flower_events_total", 'type="task-failed"') == 6
    assert watched.metric("flower_events_total", 'type="task-succeeded"') == 0
    wait_until(lambda: on_each.json("status", "sums")["state"] == "finished", 30)
    status = on_each.json("status", "sums")
    assert status["rollouts"]["failed"] == 3
    assert "raised unexpected" not in watched.worker.err


def test_what_finishes_while_a_worker_drains_is_shown_and_nothing_stays_active(on_each):
    watched = Watched(on_each, "gated", ROLLOUT_WORKER__DRAIN_S="60")
    watched.wait_states(STARTED=3)
    watched.worker.send(signal.SIGTERM)
    # It says goodbye at the signal, and then that it still works.
    wait_until(
        lambda: any(w.get("worker-offline") and w["status"] for w in watched.workers()),
        30,
        seen=watched.workers,
    )
    assert [worker["active"] for worker in watched.workers()] == [3]
    watched.gate.touch()
    watched.wait_states(SUCCESS=3)
    assert watched.worker.end().code == 0
    watched.nothing_is_active()


def test_what_a_stopping_worker_hands_back_is_shown_as_tried_again(on_each):
    watched = Watched(on_each, "gated", ROLLOUT_WORKER__DRAIN_S="0.5")
    watched.wait_states(STARTED=3)
    assert watched.worker.end(signal.SIGTERM).code == 0
    tasks = watched.wait_states(RETRY=3)
    assert "worker_stopped" in tasks["sums-g000000-r0-a1"]["exception"]
    watched.nothing_is_active()


def test_of_a_killed_worker_nothing_stays_active_longer_than_its_lease(rollout):
    watched = Watched(rollout, "gated", ROLLOUT_LEASE__LEASE_S="3")
    watched.wait_states(STARTED=3)
    watched.worker.end(signal.SIGKILL)
    tasks = watched.wait_states(FAILURE=3)
    assert tasks["sums-g000000-r0-a1"]["exception"].startswith("worker_lost: nothing was heard of")
    watched.nothing_is_active()


def test_every_page_says_what_flower_can_show_and_where_outcomes_are(rollout):
    running = rollout.start("flower", "--port", "0", "--json")
    flower = running.ready()
    for page in ("/", "/workers", "/tasks", "/broker"):
        shown = ask(flower, page)
        assert "Flower shows what workers reported since 2" in shown
        assert "rollout status RUN" in shown
        assert 'href="/tasks"' in shown
    running.end(signal.SIGTERM)


def test_the_command_says_that_earlier_tasks_are_not_there(rollout):
    running = rollout.start("flower", "--port", "0")
    wait_until(lambda: "rollout status RUN" in running.err, 60, seen=lambda: running.err)
    assert "earlier tasks are not here" in running.err
    running.end(signal.SIGTERM)
