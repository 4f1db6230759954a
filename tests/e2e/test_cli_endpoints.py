"""Which model endpoint a run is answered by, whoever's workers take its requests."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from fixtures.command_line import CommandLine, outcome_of, questions
from fixtures.waiting import wait_until
from sqlalchemy import text

REACT = ("--agent", "react", "--tools", "calculator", "--reward", "numeric")
#: Nobody can be reached there (RFC 5737), and no worker may call it unasked.
FOREIGN = "http://192.0.2.1/v1"


def wait_reported(rollout: CommandLine) -> None:
    """Wait until a worker has told the store what it takes."""
    wait_until(lambda: any(p["kind"] == "worker" for p in rollout.json("ps")["seen"]), 60)


def config_of(rollout: CommandLine, run: str) -> dict[str, Any]:
    return rollout.json("show", "run", run)["config"]


@pytest.fixture
def up(rollout: CommandLine) -> CommandLine:
    """A controller and a worker in the background that know of no endpoint."""
    rollout("up", "--workers", "1")
    wait_reported(rollout)
    return rollout


def test_workers_without_an_endpoint_call_the_one_that_the_run_probed(up, folder, offline_policy):
    questions(folder / "sums.jsonl", 8)
    base_url = offline_policy()
    named = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "sk-planted"}
    final = up.json("run", "sums.jsonl", "--run", "sums", *REACT, environment=named)
    assert final["rollouts"]["succeeded"] == 8
    shown = up.json("show", "run", "sums")
    assert (shown["config"]["base_url"], shown["config"]["model"]) == (base_url, "offline-policy")
    assert shown["config"]["queue"] == "rollouts", "the workers of `up` take part"
    assert shown["origin"]["dataset"] == str(folder / "sums.jsonl")
    assert shown["origin"]["version"]
    assert "sk-planted" not in json.dumps(shown)
    # What the first call found out is not asked for again.
    assert up.json("submit", "sums.jsonl", "--run", "sums", *REACT)["added"] == 0
    again = up.json("run", "sums.jsonl", "--run", "sums", *REACT, environment=named)
    assert outcome_of(again) == outcome_of(final)


def test_what_was_submitted_without_an_endpoint_is_answered_by_the_workers_own(
    rollout, folder, offline_policy
):
    questions(folder / "sums.jsonl", 2)
    base_url = offline_policy()
    rollout("up", "--workers", "1", environment={"OPENAI_BASE_URL": base_url})
    rollout("submit", "sums.jsonl", "--run", "sums", *REACT)
    assert rollout.json("watch", "sums", "--timeout-s", "60")["rollouts"]["succeeded"] == 2
    assert config_of(rollout, "sums")["base_url"] is None
    record = rollout.json("show", "rollout", "sums-g000000-r0", "--raw")["record"]
    assert {call["endpoint"] for call in record["calls"]} == {base_url}
    segments = rollout.json("show", "rollout", "sums-g000000-r0", "--tokens")["segments"]
    trained = sum(sum(segment["loss_mask"]) for segment in segments)
    assert trained == sum(call["completion_tokens"] for call in record["calls"]) > 0


def test_an_endpoint_that_the_workers_refuse_is_told_at_submit(up, folder):
    questions(folder / "sums.jsonl", 2)
    submit = ("submit", "sums.jsonl", *REACT, "--base-url", FOREIGN)
    refused = up.call(*submit)
    assert refused.code == 7
    assert "E134" in refused.err
    assert f"may not call {FOREIGN}" in refused.err
    assert "ROLLOUT_WORKER__ALLOWED_BASE_URLS" in refused.err
    assert up.json(*submit, "--queue", "others", "--run", "sums")["added"] == 2
    bucket = {"ROLLOUT_AGENTCORE__RESULTS_BUCKET": "results"}
    remote = ("submit", "sums.jsonl", "--executor", "agentcore", "--target", "http://10.0.0.1:8080")
    refused = up.call(*remote, environment=bucket)
    assert refused.code == 7
    assert "may not call http://10.0.0.1:8080" in refused.err


def test_a_base_url_without_its_v1_is_told_with_the_right_one(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 2)
    right = offline_policy()
    wrong = right.removesuffix("/v1")
    refused = rollout.call("run", "sums.jsonl", *REACT, "--base-url", wrong)
    assert refused.code == 3
    assert "E125" in refused.err
    assert f"--base-url {right}" in refused.err
    looked = rollout.call("doctor", "--json", environment={"OPENAI_BASE_URL": wrong})
    (check,) = [c for c in looked.document["checks"] if c["name"] == "model endpoint"]
    assert (check["status"], check["remedy"]) == ("failed", f"Set OPENAI_BASE_URL={right}")


def test_a_run_moves_with_its_model_server(rollout, folder, offline_policy):
    questions(folder / "sums.jsonl", 2)
    submit = ("submit", "sums.jsonl", "--run", "sums", *REACT)
    rollout(*submit, "--base-url", "http://127.0.0.1:9/v1")
    assert rollout.error("resume", "sums") == (6, "E204")
    base_url = offline_policy()
    final = rollout.json("resume", "sums", "--base-url", base_url)
    assert final["rollouts"]["succeeded"] == 2
    assert config_of(rollout, "sums")["base_url"] == base_url


def test_a_run_over_two_endpoints_outlives_one_of_them(rollout, folder, engine):
    questions(folder / "sums.jsonl", 30)
    servers = [rollout.start("offline-policy", "--latency-ms", "200") for _ in "ab"]
    urls = [server.ready()["base_url"] for server in servers]
    both = ("--base-url", urls[0], "--base-url", urls[1])
    running = rollout.start(
        *("run", "sums.jsonl", "--run", "sums", "-n", "2", *REACT, *both),
        *("--concurrency", "6", "--json"),
    )

    def some_done() -> int:
        with engine.connect() as connection:  # a command would take longer than the run has left
            query = text("SELECT count(*) FROM rollouts WHERE state = 'succeeded'")
            return connection.execute(query).scalar_one()

    wait_until(some_done, 60, seen=lambda: running.err)
    servers[0].end(signal.SIGKILL)
    done = running.end()
    assert done.code == 0, done.err
    assert done.document["rollouts"]["succeeded"] == done.document["attempts"] == 60
    assert config_of(rollout, "sums")["base_url"] == urls
    log = "".join(path.read_text() for path in (folder / ".rollout").rglob("worker*.log"))
    assert f"{urls[0]} is left out" in log
