"""`rollout rescore` after a run on this machine: it brings the workers that it needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, processes_of, questions, servers_of
from fixtures.fork_server import NO_FORKS
from fixtures.servers import PrivateServers
from fixtures.short_folders import short_folder
from fixtures.waiting import wait_until

MINE = """
import time
from pathlib import Path
from workers.core.registry import register_agent
from workers.rewards.registry import register_reward

@register_agent("echo")
async def echo(prompt, llm):
    return prompt["answer"]

@register_reward("half")
def half(response, answer):
    return 0.5 * (response == answer)

@register_reward("length")
def length(response):
    return {"reward": float(len(response)), "is_short": float(len(response) < 3)}

@register_reward("broken")
def broken(response):
    raise ConnectionError("the judge is away")

@register_reward("endless")
def endless(response):
    Path("began").touch()
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def finished(servers: PrivateServers, redis_url: str) -> Iterator[str]:
    """A database with a run with plug-ins, `sums`, that is finished; its processes have ended."""
    url = servers.create_database()
    with short_folder() as folder:
        rollout = CommandLine(folder, **servers_of(url, BrokerPlace("redis", redis_url)))
        questions(folder / "sums.jsonl", 3)
        (folder / "mine.py").write_text(MINE)
        model = rollout.start("offline-policy").ready()["base_url"]
        ran = ("run", "sums.jsonl", "--run", "sums", "-n", "2", "--plugin", "mine.py")
        asked = ("--agent", "echo", "--reward", "half", "--base-url", model)
        assert rollout.json(*ran, *asked)["rollouts"]["succeeded"] == 6
        yield url
        rollout.close()
    servers.drop_database(url)


@pytest.fixture
def database_url(servers: PrivateServers, finished: str) -> Iterator[str]:
    """A copy of the database with the finished run."""
    url = servers.copy_database(finished)
    yield url
    servers.drop_database(url)


@pytest.fixture
def scored(rollout: CommandLine, folder: Path) -> CommandLine:
    """The commands of a deployment whose run `sums` is finished, with the run's plug-ins."""
    (folder / "mine.py").write_text(MINE)
    return rollout


def test_a_run_with_plug_ins_is_rescored_without_any_worker_of_its_own(scored, folder):
    shown = scored.json("rescore", "sums", "--reward", "length", "--plugin", "mine.py")
    assert (shown["requested"], shown["scored"], shown["failed"]) == (6, 6, 0)
    assert [(each["name"], each["n"]) for each in shown["scores"]] == [
        ("length", 6),
        ("length.is_short", 6),
    ]
    status = scored.json("status", "sums")
    means = {each["name"]: each["mean"] for each in status["scores"]}
    assert means["length"] == shown["scores"][0]["mean"]
    assert means["half"] == status["reward"]["mean"] == 0.5, "its own reward stays what it was"
    for command in (("status", "sums"), ("show", "rollout", "sums-g000000-r0")):
        assert "length.is_short" in scored(*command).out
    assert not [line for line in processes_of(folder) if "-m rollout " in line]


def test_an_unknown_reward_is_refused_before_anything_is_asked(scored):
    done = scored.call("rescore", "sums", "--reward", "lenght", "--plugin", "mine.py", "--json")
    assert (done.code, done.document["error"]["code"]) == (2, "E107")
    assert "Did you mean 'length'?" in done.document["error"]["message"]


def test_the_plug_ins_of_the_run_are_those_of_the_worker(scored):
    shown = scored.json("rescore", "sums")
    assert (shown["reward"], shown["scored"], shown["failed"]) == ("half", 6, 0)


def test_a_reward_that_fails_everywhere_says_why_and_is_exit_code_4(scored):
    done = scored.call("rescore", "sums", "--reward", "broken", "--plugin", "mine.py", "--json")
    assert done.code == 4
    assert (done.document["scored"], done.document["failed"]) == (0, 6)
    assert "the judge is away" in done.err


def test_a_wait_without_values_is_bounded_and_explained(scored):
    asked = ("rescore", "sums", "--reward", "numeric")
    done = scored.call(*asked, "--workers", "0", "--wait-timeout", "1", "--json")
    assert (done.code, done.document["error"]["code"]) == (5, "E140")
    assert "rollouts.sums" in done.document["error"]["message"]


def test_an_interrupted_rescore_leaves_no_process_and_says_how_to_go_on(scored, folder):
    # Forks start so soon that the interruption can meet the start of the next one.
    rescore = ("rescore", "sums", "--reward", "endless", "--plugin", "mine.py")
    running = scored.start(*rescore, environment={NO_FORKS: "1"})
    wait_until((folder / "began").exists, 60, seen=lambda: running.err)
    done = running.end(signal.SIGINT)
    assert done.code == 130
    assert "0 of 6 trajectories were scored" in done.err
    assert "rollout rescore sums --reward endless" in done.err
    assert not [line for line in processes_of(folder) if "-m rollout " in line]


def test_workers_that_read_the_queue_of_the_run_score_it(scored):
    worker = ("worker", "--queues", "rollouts.sums", "--plugin", "mine.py", "--json")
    scored.start(*worker).ready()
    done = scored("rescore", "sums", "--json")
    assert (done.document["scored"], done.document["failed"]) == (6, 0)
    assert "is started here" not in done.err
