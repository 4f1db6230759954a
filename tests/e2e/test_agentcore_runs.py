"""Runs whose attempts are sessions of a remote agent, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from fixtures.agentcore_runtime import (
    ARN,
    PLAIN_APP,
    Quotas,
    local_runtime,
    make_buckets,
    serving,
    set_environment,
)
from fixtures.scripted_model import scripted_model
from fixtures.waiting import wait_until


@pytest.fixture
def place(aws_url, database_url, redis_url, tmp_path):
    """Settings of a deployment whose results go to a bucket and a queue of their own."""
    buckets = make_buckets(aws_url)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ROLLOUT_")},
        **buckets.environment,
        "ROLLOUT_DATABASE__URL": database_url,
        "ROLLOUT_BROKER__URL": redis_url,
        "ROLLOUT_BROKER__PREFIX": f"ac-{uuid.uuid4().hex[:8]}-",
        "ROLLOUT_DATA_DIR": str(tmp_path / "data"),
        "ROLLOUT_AGENTCORE__RESULTS_BUCKET": buckets.bucket,
        "ROLLOUT_AGENTCORE__RESULTS_QUEUE_URL": buckets.queue_url,
    }
    return buckets, environment


def dataset(folder, rows):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rollout(environment, *arguments, timeout_s=100):
    done = subprocess.run(
        [sys.executable, "-m", "rollout", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done


@contextmanager
def started(environment, *arguments):
    """A command that runs while the block does."""
    command = [sys.executable, "-m", "rollout", *map(str, arguments)]
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "reward": i / 10} for i in range(6)]


def test_a_run_through_sessions_keeps_the_apps_rewards_and_leaves_no_session(place, tmp_path):
    buckets, environment = place
    with local_runtime(
        PLAIN_APP, tmp_path, environment=buckets.environment, quotas=Quotas(max_sessions=8)
    ) as running:
        environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        environment["ROLLOUT_AGENTCORE__MAX_SESSIONS"] = "8"
        done = rollout(
            environment, "run", dataset(tmp_path, ROWS), "--run", "remote", "-n", 2,
            "--executor", "agentcore", "--target", ARN, "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        status = json.loads(done.stdout)
        assert status["rollouts"]["succeeded"] == 12
        assert status["warnings"] == []
        figures = running.figures()
        assert figures["live_sessions"] == 0
        assert figures["most_sessions"] <= 8
        assert figures.get("over_quota", 0) == figures.get("throttled", 0) == 0
    exported = rollout(environment, "export", "remote", "-o", tmp_path / "out.jsonl")
    assert exported.returncode == 0, exported.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_prompt = {line["messages"][0]["content"]: line["reward"] for line in lines}
    assert by_prompt == {row["question"]: row["reward"] for row in ROWS}
    # A reward of ours scores the stored trajectories, without the agent.
    scored = rollout(environment, "rescore", "remote", "--reward", "gsm8k", "--json")
    assert scored.returncode == 0, scored.stderr
    (score,) = json.loads(scored.stdout)["scores"]
    assert (score["name"], score["n"], score["mean"]) == ("gsm8k", 12, 1.0)


BAD = [
    {"question": "app fails", "fails": "on purpose"},
    {"question": "nan", "nan": True},
    {"question": "text", "reward": "much"},
    {"question": "wrong length", "reward": [1.0, 2.0, 3.0]},
    {"question": "large", "padding": 50_000_000, "reward": 0.25},
    {"question": "zero", "reward": 0.0},
    {"question": "listed", "reward": [0.75]},
]


def test_bad_results_and_foreign_messages_are_coded_and_nothing_is_lost(place, tmp_path):
    buckets, environment = place
    sqs, s3 = buckets.client("sqs"), buckets.client("s3")
    foreign = {"s3": {"bucket": {"name": "b"}, "object": {"key": "somebody/else.json"}}}
    for body in ("no json", json.dumps({"Records": [foreign]})):
        sqs.send_message(QueueUrl=buckets.queue_url, MessageBody=body)
    for key in ("bad/g000001/unknown.json", "bad/notes.txt"):
        s3.put_object(Bucket=buckets.bucket, Key=key, Body=b"?")
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        done = rollout(
            environment, "run", dataset(tmp_path, BAD), "--run", "bad", "--max-attempts", 2,
            "--max-error-rate", 1, "--set", "backoff_base_s=0.1",
            "--executor", "agentcore", "--target", ARN, "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert running.figures()["live_sessions"] == 0
        assert running.figures()["sessions"] == len(BAD) + 1, "only the agent's bug is tried again"
    counts = json.loads(done.stdout)["rollouts"]
    assert (counts["succeeded"], counts["failed"]) == (3, 4)
    out = tmp_path / "bad.jsonl"
    assert rollout(environment, "export", "bad", "-o", out).returncode == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    good = [line for line in lines if line["reward"] is not None]
    rewards = {line["messages"][0]["content"]: line["reward"] for line in good}
    assert rewards == {"large": 0.25, "zero": 0.0, "listed": 0.75}
    errors = json.loads(rollout(environment, "errors", "bad", "--json").stdout)
    assert {(e["error_class"], e["code"]) for e in errors["errors"]} >= {
        ("agent_bug", "app"),
        ("contract", "app"),
    }, errors
    letters = json.loads(rollout(environment, "dlq", "list", "--json").stdout)["dead_letters"]
    assert sorted(letter["reason"][:4] for letter in letters) == ["E310", "E311"]


def test_without_messages_nothing_is_lost_or_twice_and_killed_sessions_are_tried_again(
    place, tmp_path
):
    buckets, environment = place
    del environment["ROLLOUT_AGENTCORE__RESULTS_QUEUE_URL"]
    rows = [{"question": str(i), "reward": i / 10} for i in range(4)]
    # The session works for a while, so that its worker has handed the attempt over.
    rows[1] |= {"wait_s": 1.0, "dies_once": str(tmp_path / "died")}
    rows.append({"question": "late", "wait_s": 300})
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        environment |= {
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": running.url,
            "ROLLOUT_AGENTCORE__SESSION_TIMEOUT_S": "5",
        }
        done = rollout(
            environment, "run", dataset(tmp_path, rows), "--run", "swept", "--max-attempts", 2,
            "--set", "backoff_base_s=0.1", "--executor", "agentcore", "--target", ARN, "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        figures = running.figures()
    assert (figures["sessions"], figures["live_sessions"]) == (7, 0)
    status = json.loads(done.stdout)
    counts = status["rollouts"]
    assert (counts["succeeded"], counts["failed"], status["attempts"]) == (4, 1, 7)
    errors = json.loads(rollout(environment, "errors", "swept", "--json").stdout)["errors"]
    assert [error["error_class"] for error in errors] == ["agent_timeout"]
    assert "5 s" in json.dumps(errors)
    assert rollout(environment, "export", "swept", "-o", tmp_path / "out.jsonl").returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    assert sorted(rewards) == [0.0, 0.1, 0.2, 0.3]


def test_cancelling_a_run_stops_its_sessions_within_the_shared_rate(place, tmp_path):
    buckets, environment = place
    rows = [{"question": str(i), "wait_s": 300} for i in range(6)]
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        options = ("--run", "stopped", "--executor", "agentcore", "--target", ARN)
        with started(environment, "run", dataset(tmp_path, rows), *options) as process:
            wait_until(lambda: running.figures()["live_sessions"] == len(rows), timeout_s=60)
            done = rollout(environment, "cancel", "stopped", "--yes")
            assert done.returncode == 0, done.stderr
            output, _ = process.communicate(timeout=60)
        figures = running.figures()
    assert (figures["stops"], figures["live_sessions"]) == (len(rows), 0), output
    (limit,) = json.loads(rollout(environment, "limits", "show", "--json").stdout)
    assert limit["granted"] >= figures["invocations"] + figures["stops"]


def test_resume_takes_in_what_ended_while_nothing_ran(place, tmp_path):
    buckets, environment = place
    gate = tmp_path / "gate"
    rows = [{"question": str(i), "reward": i / 10, "wait_for": str(gate)} for i in range(3)]
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        options = ("--run", "left", "--executor", "agentcore", "--target", ARN)
        with started(environment, "run", dataset(tmp_path, rows), *options) as process:
            wait_until(lambda: running.figures()["live_sessions"] == len(rows), timeout_s=60)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        gate.touch()
        wait_until(lambda: len(buckets.keys()) == len(rows), what="results")
        done = rollout(environment, "resume", "left", "--json")
        assert done.returncode == 0, done.stderr
        figures = running.figures()
    status = json.loads(done.stdout)
    assert (status["rollouts"]["succeeded"], status["attempts"]) == (3, 3)
    assert (figures["sessions"], figures["stops"], figures["live_sessions"]) == (3, 3, 0)


def test_a_plain_container_calls_the_gateway_with_a_key_that_nothing_keeps(place, tmp_path):
    from workers.agentcore import AgentCoreRLApp

    buckets, environment = place
    keys = []
    with set_environment(buckets.environment), scripted_model(lambda _: "42") as model:
        app = AgentCoreRLApp()

        @app.rollout_entrypoint
        def answers(payload):
            named = payload["_rollout"]
            keys.append(named["api_key"])
            with openai.OpenAI(base_url=named["base_url"], api_key=named["api_key"]) as client:
                asked: Any = [{"role": "user", "content": payload["prompt"]}]
                reply = client.chat.completions.create(model=named["model_id"], messages=asked)
            text = f"{reply.choices[0].message.content} by {named['api_key']}"
            turn = {"formatted_request": {"messages": [{"role": "assistant", "content": text}]}}
            return {"rollout_data": [turn], "rewards": 1.0}

        environment |= {"ROLLOUT_BROKER__SIGNING_KEY": "shared", "OPENAI_BASE_URL": model.base_url}
        command = ("gateway", "--port", "0", "--json", "--while-stdin")
        with serving(app) as url, started(environment, *command) as gateway:
            assert gateway.stdout is not None
            ready = json.loads(gateway.stdout.readline())
            environment["ROLLOUT_AGENTCORE__GATEWAY_URL"] = ready["base_url"]
            done = rollout(
                environment, "run", dataset(tmp_path, ROWS[:3]), "--run", "plain",
                "--executor", "agentcore", "--target", url, "--json",
            )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rollouts"]["succeeded"] == len(set(keys)) == 3
    saved = [buckets.read(name)["payload"]["_rollout"] for name in sorted(buckets.keys())]
    assert [rollout_config["api_key"] for rollout_config in saved] == ["***"] * 3
    assert rollout(environment, "export", "plain", "-o", tmp_path / "out.jsonl").returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["messages"][-1]["content"] for line in lines] == ["42 by ***"] * 3
    kept = [*(tmp_path / "data").rglob("*"), tmp_path / "out.jsonl"]
    found = [path for path in kept if path.is_file() and b"rpk-" in path.read_bytes()]
    assert not found


@pytest.mark.parametrize(
    ("options", "unset", "code"),
    [
        (("--executor", "agentcore"), (), 2),
        (("--executor", "agentcore", "--target", "nowhere"), (), 2),
        (("--executor", "agentcore", "--target", "arn:aws:s3:::bucket"), (), 2),
        (("--executor", "elsewhere"), (), 2),
        (("--target", ARN), (), 2),
        (("--executor", "agentcore", "--target", ARN, "--reward", "exact_match"), (), 2),
        (("--executor", "agentcore", "--target", ARN), ("RESULTS_BUCKET",), 3),
        (("--executor", "agentcore", "--target", ARN), ("RESULTS_QUEUE_URL",), 3),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(place, tmp_path, options, unset, code):
    _, environment = place
    environment["ROLLOUT_AGENTCORE__PAYLOAD_STYLE"] = "training"
    for name in unset:
        del environment[f"ROLLOUT_AGENTCORE__{name}"]
    done = rollout(environment, "run", dataset(tmp_path, ROWS), *options)
    assert done.returncode == code, done.stderr
    assert not (tmp_path / "data" / "logs").exists()
