"""Workers score trajectories that remote sessions left: with their tokens, or not at all."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.messages import completion_of, request_of
from fixtures.stored_run import StoredRun, answered
from sqlalchemy import Engine

from pipeline.contract.errors import ServiceUnavailable
from pipeline.contract.trajectory import pack_record
from pipeline.dispatcher import Dispatcher
from pipeline.queue.broker import broker_of
from pipeline.queue.claim_checks import check_out
from pipeline.queue.frames import encode_completions
from pipeline.queue.payloads import FolderPayloads, open_payloads
from pipeline.queue.requests import RequestPublisher
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.remote_sessions import open_sessions
from workers.process.execution import execute
from workers.process.runtime import Runtime
from workers.rewards.registry import register_reward

TARGET = {
    "target": "arn:aws:bedrock-agentcore:us-west-2:1:runtime/x",
    "results_bucket": "b",
    "session_timeout_s": 60.0,
}
MakeSettings = Callable[..., Settings]


def session_left(**fields: Any) -> Any:
    body = pack_record(answered("7", metadata={"stop_reason": "max_tokens"}))
    values = {"purpose": "unscored", "reward": None, "body": body, "n_turns": 2, **fields}
    return completion_of(prompt_tokens=20, completion_tokens=4, version_max=6, **values)


def scoring_of(left: Any, **fields: Any) -> Any:
    """Return the request of the attempt that scores what a session left."""
    frame = base64.b64encode(encode_completions([left])).decode()
    values = {
        "agent": "agentcore",
        "agentcore": TARGET,
        "attempt_no": 2,
        "label": left.label.replace("-a1", "-a2"),
        "reward": "numeric",
        "prompt": {"content": "3+4?", "answer": "7"},
        "unscored_no": 1,
        "unscored": frame,
    }
    return request_of(**values | fields)


async def test_the_reward_comes_to_the_trajectory_and_the_tokens_as_the_session_left_them(
    make_settings: MakeSettings,
) -> None:
    left = session_left(tokens=b"ids", tokens_bytes=3, tokens_digest="0" * 32)
    request = scoring_of(left)
    done = await execute(request, Runtime(make_settings(), "w2"))
    assert (done.outcome, done.purpose, done.reward) == ("succeeded", "attempt", 1.0)
    assert (done.key, done.label, done.worker_id) == (request.key, request.label, "w2")
    same = ("body", "body_digest", "tokens", "tokens_digest", "n_turns", "version_max")
    assert [getattr(done, name) for name in same] == [getattr(left, name) for name in same]
    assert done.stop_reason == "max_tokens"
    assert (done.calls_replayed, done.replayed_from, done.tokens_saved) == (2, (1,), 24)
    assert [part.name for part in done.reward_parts] == ["numeric"]


async def test_a_failed_scorer_leaves_an_error_with_the_trajectory(
    make_settings: MakeSettings,
) -> None:
    @register_reward("raises")
    def raises(response: str) -> float:
        raise ValueError("no verdict")

    left = session_left()
    done = await execute(scoring_of(left, reward="raises"), Runtime(make_settings(), "w2"))
    assert done.error is not None
    assert (done.error.error_class, done.error.phase) == ("reward_error", "scoring")
    assert (done.reward, done.body) == (None, left.body)


async def test_a_trajectory_that_is_gone_is_an_error_and_one_out_of_reach_is_tried_again(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    left = check_out(session_left(), open_payloads(settings))
    runtime = Runtime(settings, "w2")
    assert (await execute(scoring_of(left), runtime)).reward == 1.0

    gone = left.model_copy(update={"body_uri": f"{left.body_uri}x"})
    done = await execute(scoring_of(gone), runtime)
    assert done.error is not None
    assert (done.error_class, done.error.code) == ("reward_error", "no_trajectory")
    assert done.body_uri == gone.body_uri, "it is still named"

    def away(*_: Any) -> Any:
        raise ServiceUnavailable("The payload store does not answer.")

    monkeypatch.setattr(FolderPayloads, "get", away)
    done = await execute(scoring_of(left), runtime)
    assert done.error is not None
    assert (done.error_class, done.error.code) == ("sandbox", "payload_store")


async def test_a_request_without_its_trajectory_runs_no_session(
    make_settings: MakeSettings,
) -> None:
    done = await execute(scoring_of(session_left(), unscored=""), Runtime(make_settings(), "w2"))
    assert done.error is not None
    assert (done.error_class, done.error.code) == ("contract", "no_trajectory")


async def test_a_scorer_that_kills_its_process_is_isolated_like_an_agent(
    make_settings: MakeSettings, tmp_path: Any
) -> None:
    plugin = tmp_path / "killing_rewards.py"
    plugin.write_text(
        "import os, signal\n"
        "from rollout import register_reward\n"
        "@register_reward('kills')\n"
        "def kills(response):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    settings = make_settings(worker={"plugins": [str(plugin)]})
    runtime = Runtime(settings, "w2", isolates=True)
    assert runtime.isolation is not None
    try:
        good = await execute(scoring_of(session_left(), lost_count=2), runtime)
        done = await execute(scoring_of(session_left(), lost_count=2, reward="kills"), runtime)
    finally:
        runtime.isolation.close()
    assert good.reward == 1.0
    assert done.error is not None
    assert (done.error_class, done.error.code) == ("worker_lost", "process_died")


def test_scoring_is_published_while_all_sessions_are_in_use(
    engine: Engine, redis_place: BrokerPlace, make_settings: MakeSettings
) -> None:
    story = StoredRun(engine, prompts=3, agent="agentcore", agentcore=TARGET)
    settings = make_settings(redis_place, agentcore={"max_sessions": 2})
    for attempt in (first := story.claim(2)):
        transact(engine, lambda c, a=attempt: open_sessions(c, story.run, [a]))
    story.record(story.succeeded(first[1], None, purpose="unscored"))
    broker = broker_of(settings)
    dispatcher = Dispatcher(engine, RequestPublisher(broker, expires_s=60), settings)
    try:
        dispatcher.step()
        with broker.connect() as connection:
            assert broker.depth(connection, "rollouts") == 1
    finally:
        dispatcher.close()
    assert [row["attempt_no"] for row in story.rollouts()] == [1, 2, 0]
    assert story.states() == {"dispatched": 2, "queued": 1}
