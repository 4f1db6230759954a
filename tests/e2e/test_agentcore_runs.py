"""Runs whose attempts are sessions of a remote agent, through the command line."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from fixtures.agentcore_cli import buckets, dataset, rollout
from fixtures.agentcore_runtime import (
    ARN,
    PLAIN_APP,
    Quotas,
    local_runtime,
    serving,
    set_environment,
)
from fixtures.scripted_model import scripted_model
from fixtures.waiting import wait_until

__all__ = ["buckets", "rollout"]

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "reward": i / 10} for i in range(3)]


def test_a_run_through_sessions_keeps_the_apps_rewards_and_leaves_no_session(
    buckets, rollout, tmp_path
):
    with local_runtime(
        PLAIN_APP, tmp_path, environment=buckets.environment, quotas=Quotas(max_sessions=4)
    ) as running:
        rollout.environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        rollout.environment["ROLLOUT_AGENTCORE__MAX_SESSIONS"] = "4"
        status = rollout.json(
            "run", dataset(tmp_path, ROWS), "--run", "remote", "-n", 2,
            "--executor", "agentcore", "--target", ARN,
        )  # fmt: skip
        assert status["rollouts"]["succeeded"] == 2 * len(ROWS)
        assert status["warnings"] == []
        figures = running.figures()
        assert figures["live_sessions"] == 0
        assert figures["most_sessions"] <= 4
        assert figures.get("over_quota", 0) == figures.get("throttled", 0) == 0
    rollout("export", "remote", "-o", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_prompt = {line["messages"][0]["content"]: line["reward"] for line in lines}
    assert by_prompt == {row["question"]: row["reward"] for row in ROWS}
    # A reward of ours scores the stored trajectories, without the agent.
    (score,) = rollout.json("rescore", "remote", "--reward", "gsm8k")["scores"]
    assert (score["name"], score["n"], score["mean"]) == ("gsm8k", 2 * len(ROWS), 1.0)


BAD = [
    {"question": "app fails", "fails": "on purpose"},
    {"question": "nan", "nan": True},
    {"question": "text", "reward": "much"},
    {"question": "wrong length", "reward": [1.0, 2.0, 3.0]},
    {"question": "large", "padding": 50_000_000, "reward": 0.25},
    {"question": "zero", "reward": 0.0},
    {"question": "listed", "reward": [0.75]},
]


def test_bad_results_and_foreign_messages_are_coded_and_nothing_is_lost(buckets, rollout, tmp_path):
    sqs, s3 = buckets.client("sqs"), buckets.client("s3")
    foreign = {"s3": {"bucket": {"name": "b"}, "object": {"key": "somebody/else.json"}}}
    for body in ("no json", json.dumps({"Records": [foreign]})):
        sqs.send_message(QueueUrl=buckets.queue_url, MessageBody=body)
    for key in ("bad/g000001/unknown.json", "bad/notes.txt"):
        s3.put_object(Bucket=buckets.bucket, Key=key, Body=b"?")
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        rollout.environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        status = rollout.json(
            "run", dataset(tmp_path, BAD), "--run", "bad", "--max-attempts", 2,
            "--max-error-rate", 1, "--set", "backoff_base_s=0.1",
            "--executor", "agentcore", "--target", ARN,
        )  # fmt: skip
        assert running.figures()["live_sessions"] == 0
        assert running.figures()["sessions"] == len(BAD) + 1, "only the agent's bug is tried again"
    counts = status["rollouts"]
    assert (counts["succeeded"], counts["failed"]) == (3, 4)
    out = tmp_path / "bad.jsonl"
    rollout("export", "bad", "-o", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    good = [line for line in lines if line["reward"] is not None]
    rewards = {line["messages"][0]["content"]: line["reward"] for line in good}
    assert rewards == {"large": 0.25, "zero": 0.0, "listed": 0.75}
    errors = rollout.json("errors", "bad")
    assert {(e["error_class"], e["code"]) for e in errors["errors"]} >= {
        ("agent_bug", "app"),
        ("contract", "app"),
    }, errors
    letters = rollout.json("dlq", "list")["dead_letters"]
    assert sorted(letter["reason"][:4] for letter in letters) == ["E310", "E311"]


def test_without_messages_nothing_is_lost_or_twice_and_killed_sessions_are_tried_again(
    buckets, rollout, tmp_path
):
    del rollout.environment["ROLLOUT_AGENTCORE__RESULTS_QUEUE_URL"]
    rows = [{"question": str(i), "reward": i / 10} for i in range(4)]
    # The session works for a while, so that its worker has handed the attempt over.
    rows[1] |= {"wait_s": 1.0, "dies_once": str(tmp_path / "died")}
    rows.append({"question": "late", "wait_s": 300})
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        rollout.environment |= {
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": running.url,
            "ROLLOUT_AGENTCORE__SESSION_TIMEOUT_S": "5",
        }
        status = rollout.json(
            "run", dataset(tmp_path, rows), "--run", "swept", "--max-attempts", 2,
            "--set", "backoff_base_s=0.1", "--executor", "agentcore", "--target", ARN,
        )  # fmt: skip
        figures = running.figures()
    assert (figures["sessions"], figures["live_sessions"]) == (7, 0)
    counts = status["rollouts"]
    assert (counts["succeeded"], counts["failed"], status["attempts"]) == (4, 1, 7)
    errors = rollout.json("errors", "swept")["errors"]
    assert [error["error_class"] for error in errors] == ["agent_timeout"]
    assert "5 s" in json.dumps(errors)
    rollout("export", "swept", "-o", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    assert sorted(rewards) == [0.0, 0.1, 0.2, 0.3]


def test_cancelling_a_run_stops_its_sessions_within_the_shared_rate(buckets, rollout, tmp_path):
    rows = [{"question": str(i), "wait_s": 300} for i in range(6)]
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        rollout.environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        options = ("--run", "stopped", "--executor", "agentcore", "--target", ARN)
        process = rollout.start("run", dataset(tmp_path, rows), *options)
        wait_until(lambda: running.figures()["live_sessions"] == len(rows), timeout_s=60)
        rollout("cancel", "stopped", "--yes")
        done = process.end()
        figures = running.figures()
    assert (figures["stops"], figures["live_sessions"]) == (len(rows), 0), done.err
    (limit,) = rollout.json("limits", "show")
    assert limit["granted"] >= figures["invocations"] + figures["stops"]


def test_resume_takes_in_what_ended_while_nothing_ran(buckets, rollout, tmp_path):
    gate = tmp_path / "gate"
    rows = [{"question": str(i), "reward": i / 10, "wait_for": str(gate)} for i in range(3)]
    with local_runtime(PLAIN_APP, tmp_path, environment=buckets.environment) as running:
        rollout.environment["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = running.url
        options = ("--run", "left", "--executor", "agentcore", "--target", ARN)
        process = rollout.start("run", dataset(tmp_path, rows), *options)
        wait_until(lambda: running.figures()["live_sessions"] == len(rows), timeout_s=60)
        done = process.end(signal.SIGINT)
        assert done.code == 130, done.err
        gate.touch()
        wait_until(lambda: len(buckets.keys()) == len(rows), what="results")
        status = rollout.json("resume", "left")
        figures = running.figures()
    assert (status["rollouts"]["succeeded"], status["attempts"]) == (3, 3)
    assert (figures["sessions"], figures["stops"], figures["live_sessions"]) == (3, 3, 0)


def test_a_plain_container_calls_the_gateway_with_a_key_that_nothing_keeps(
    buckets, rollout, tmp_path
):
    from workers.agentcore import AgentCoreRLApp

    keys = []
    with set_environment(buckets.environment), scripted_model(lambda _: "42") as model:
        app = AgentCoreRLApp()

        @app.rollout_entrypoint
        def answers(payload):
            import openai

            named = payload["_rollout"]
            keys.append(named["api_key"])
            with openai.OpenAI(base_url=named["base_url"], api_key=named["api_key"]) as client:
                asked: Any = [{"role": "user", "content": payload["prompt"]}]
                reply = client.chat.completions.create(model=named["model_id"], messages=asked)
            text = f"{reply.choices[0].message.content} by {named['api_key']}"
            turn = {"formatted_request": {"messages": [{"role": "assistant", "content": text}]}}
            return {"rollout_data": [turn], "rewards": 1.0}

        rollout.environment |= {
            "ROLLOUT_BROKER__SIGNING_KEY": "shared",
            "OPENAI_BASE_URL": model.base_url,
        }
        ready = rollout.start("gateway", "--port", "0", "--json").ready()
        with serving(app) as url:
            rollout.environment["ROLLOUT_AGENTCORE__GATEWAY_URL"] = ready["base_url"]
            status = rollout.json(
                "run", dataset(tmp_path, ROWS), "--run", "plain",
                "--executor", "agentcore", "--target", url,
            )  # fmt: skip
    assert status["rollouts"]["succeeded"] == len(set(keys)) == 3
    saved = [buckets.read(name)["payload"]["_rollout"] for name in sorted(buckets.keys())]
    assert [rollout_config["api_key"] for rollout_config in saved] == ["***"] * 3
    rollout("export", "plain", "-o", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["messages"][-1]["content"] for line in lines] == ["42 by ***"] * 3
    (call,) = json.loads(rollout("show", "rollout", "plain-g000000-r0", "--raw").out)["calls"]
    assert call["response"]["content"] == "42", "the gateway's record"
    kept = [*(tmp_path / "data").rglob("*"), tmp_path / "out.jsonl"]
    found = [path for path in kept if path.is_file() and b"rpk-" in path.read_bytes()]
    assert not found


@pytest.mark.parametrize("style", ["training", "rollout"])
def test_a_plain_container_needs_no_gateway(buckets, rollout, tmp_path, style):
    from workers.agentcore import AgentCoreRLApp

    with set_environment(buckets.environment):
        app = AgentCoreRLApp()

        @app.rollout_entrypoint
        def answers(payload):
            turn = {"formatted_request": {"messages": [{"role": "assistant", "content": "42"}]}}
            return {"rollout_data": [turn], "rewards": payload["reward"]}

        rollout.environment["ROLLOUT_AGENTCORE__PAYLOAD_STYLE"] = style
        with serving(app) as url:
            status = rollout.json(
                "run", dataset(tmp_path, ROWS), "--run", "plain",
                "--executor", "agentcore", "--target", url,
            )  # fmt: skip
    assert status["rollouts"]["succeeded"] == status["attempts"] == 3
    assert len(buckets.keys()) == 3
    rollout("export", "plain", "-o", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(line["reward"] for line in lines) == [0.0, 0.1, 0.2]


REWARDS = """
from rollout import register_reward

@register_reward("ours")
def ours(response, answer, prompt, trajectory):
    if prompt.get("fails"):
        raise ValueError("no verdict")
    return 0.5 if response == f"#### {answer}" else 0.0
"""


def test_a_named_reward_scores_what_the_sessions_left_and_the_apps_need_not_exist(
    buckets, rollout, tmp_path
):
    from workers.agentcore import AgentCoreRLApp

    plugin = tmp_path / "our_rewards.py"
    plugin.write_text(REWARDS)
    rows = [
        {"question": "right", "answer": "1", "app_says": 0.9},
        {"question": "alone", "answer": "2"},
        {"question": "wrong", "answer": "3", "says": "4", "app_says": 0.9},
        {"question": "silent", "answer": "5", "says": None},
        {"question": "fails", "answer": "6", "fails": 1, "app_says": 0.9},
    ]
    with set_environment(buckets.environment):
        app = AgentCoreRLApp()

        @app.rollout_entrypoint
        def answers(payload):
            said = payload.get("says", payload["answer"])
            messages = [{"role": "user", "content": payload["prompt"]}]
            if said is not None:
                messages.append({"role": "assistant", "content": f"#### {said}"})
            own = {"rewards": payload["app_says"]} if "app_says" in payload else {}
            return {"rollout_data": [{"formatted_request": {"messages": messages}}], **own}

        with serving(app) as url:
            status = rollout.json(
                "run", dataset(tmp_path, rows), "--run", "ours", "--max-error-rate", 1,
                "--executor", "agentcore", "--target", url,
                "--reward", "ours", "--plugin", plugin,
            )  # fmt: skip
    counts = status["rollouts"]
    assert (counts["succeeded"], counts["failed"], len(buckets.keys())) == (3, 2, 5)
    rollout("export", "ours", "-o", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    good = [line for line in lines if line["reward"] is not None]
    rewards = {line["messages"][0]["content"]: line["reward"] for line in good}
    assert rewards == {"right": 0.5, "alone": 0.5, "wrong": 0.0}
    errors = {(e["error_class"], e["code"]) for e in rollout.json("errors", "ours")["errors"]}
    assert errors == {("contract", "no_answer"), ("reward_error", "reward_raised")}
    metadata = json.loads(rollout("show", "rollout", "ours-g000000-r0", "--raw").out)["metadata"]
    assert metadata["rewards"] == 0.9, "the app's reward is kept beside ours"

    # The scorer is well again: the trajectory is scored, and no session runs.
    plugin.write_text(REWARDS.replace('prompt.get("fails")', "False"))
    rollout("rescore", "ours", "--plugin", plugin)
    assert rollout.json("status", "ours")["rollouts"]["succeeded"] == 4
    assert len(buckets.keys()) == 5


@pytest.mark.parametrize(
    ("options", "unset", "code"),
    [
        (("--executor", "agentcore"), (), 2),
        (("--executor", "agentcore", "--target", "nowhere"), (), 2),
        (("--executor", "agentcore", "--target", "arn:aws:s3:::bucket"), (), 2),
        (("--executor", "elsewhere"), (), 2),
        (("--target", ARN), (), 2),
        (("--executor", "agentcore", "--target", ARN, "--reward", "unknown"), (), 2),
        (("--executor", "agentcore", "--target", ARN), ("RESULTS_BUCKET",), 3),
        (("--executor", "agentcore", "--target", ARN), ("RESULTS_QUEUE_URL",), 3),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(rollout, tmp_path, options, unset, code):
    rollout.environment["ROLLOUT_AGENTCORE__PAYLOAD_STYLE"] = "training"
    for name in unset:
        del rollout.environment[f"ROLLOUT_AGENTCORE__{name}"]
    done = rollout.call("run", dataset(tmp_path, ROWS), *options)
    assert done.code == code, done.err
    assert not (tmp_path / "data" / "logs").exists()
