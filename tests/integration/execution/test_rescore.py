"""Stored trajectories scored again: without the agent, into the books, never behind a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import Completion, RescoreRequest, parse_message
from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import TrajectoryRecord, digest_of, pack_record
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.payloads import FolderPayloads
from pipeline.requests import rescore_request_of
from pipeline.store.accounting import check_accounting
from pipeline.store.engine import transact
from pipeline.store.operations import begin_cancel, cancel_rollouts
from pipeline.store.rescorable import count_rescorable, read_rescorable
from pipeline.store.rescores import record_rescores
from pipeline.trainer.client import TrainerClient
from workers.core.model_response import ModelResponse
from workers.core.trajectory import Trajectory
from workers.process.scoring import rescore
from workers.rewards.registry import clear_rewards, register_reward

SCORING = ErrorClass.REWARD_ERROR


@pytest.fixture
def payloads(tmp_path: Path) -> FolderPayloads:
    return FolderPayloads(tmp_path / "payloads")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.process.scoring.SCORING_WAIT_S", 0.0)


def break_judge() -> None:
    @register_reward("judge", inline=True)
    def judge(response: str) -> float:
        raise ConnectionError("the judge is away")


def mend_judge(version: str = "1") -> list[Trajectory]:
    """Let the judge answer from now on; return what it is asked."""
    clear_rewards()
    seen: list[Trajectory] = []

    @register_reward("judge", inline=True, version=version)
    def judge(response: str, answer: str, trajectory: Trajectory) -> dict[str, float]:
        seen.append(trajectory)
        return {"reward": float(response == answer), "length": len(response)}

    return seen


def failed_in_scoring(engine: Any, worker: ScriptedWorker, **config: Any) -> StoredRun:
    break_judge()
    story = StoredRun(engine, **{"reward": "judge", **config})
    worker.work_off(story)
    assert set(story.states()) == {"failed"}
    return story


def ask_again(
    story: StoredRun,
    payloads: FolderPayloads,
    *,
    reward: str = "judge",
    error_class: ErrorClass | None = None,
    inline_bytes: int = 100_000,
) -> list[Completion]:
    """Do what command, worker and collector do, in one go; return what the worker said."""
    chunk = transact(story.engine, lambda c: read_rescorable(c, story.run, error_class=error_class))
    said = []
    for stored in chunk:
        request = rescore_request_of(story.run, stored, reward, payloads, inline_bytes=inline_bytes)
        message = request.model_dump_json(exclude_defaults=True)
        completion = asyncio.run(
            rescore(parse_message(RescoreRequest, message), payloads, "scripted-worker")
        )
        said += decode_completions(encode_completions([completion]))[0]
    take_in(story, said)
    return said


def take_in(story: StoredRun, said: Sequence[Completion]) -> None:
    assert transact(story.engine, lambda c: record_rescores(c, said)) == []
    with story.engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def rewards(story: StoredRun) -> list[tuple[Any, ...]]:
    rows = story.rows(
        "SELECT name, scorer_version, value, status, w.error_class FROM rewards w"
        " JOIN rollouts USING (rollout_id) WHERE run_id = :run_id ORDER BY 1, 2, 3"
    )
    return [tuple(row.values()) for row in rows]


def test_a_failure_in_scoring_keeps_the_trajectory_and_has_no_reward(engine, make_worker):
    worker = make_worker("1")
    story = failed_in_scoring(engine, worker)
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["error_class"], rollout["reward"]) == (
        "failed",
        SCORING,
        None,
    )
    assert rewards(story) == [("judge", "1", None, "error", SCORING)]
    assert len(worker.client.calls) == 1, "the agent ran once"


@pytest.mark.parametrize("inline_bytes", [100_000, 0], ids=["inline", "by reference"])
def test_a_rollout_that_lacked_only_its_reward_becomes_good(
    engine, make_worker, payloads, inline_bytes
):
    ids = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-0.5]}
    worker = make_worker(ModelResponse("1", **ids), "1")  # one answer of two has ids
    story = failed_in_scoring(engine, worker, n=2)
    (group,) = story.groups()
    assert (group["state"], group["drop_reason"]) == ("dropped", "failed")
    seen = mend_judge()
    ask_again(story, payloads, inline_bytes=inline_bytes)
    for rollout in story.rollouts():
        assert (rollout["state"], rollout["reward"]) == ("succeeded", 1.0)
        assert (rollout["stop_reason"], rollout["winner_attempt_no"]) == ("answered", 1)
        assert rollout["error_class"] is None
    (group,) = story.groups()
    assert (group["state"], group["n_succeeded"], group["reward_mean"]) == ("ready", 2, 1.0)
    assert sum(rollout["has_tokens"] for rollout in story.rollouts()) == 1
    assert len(worker.client.calls) == 2, "no agent ran again"
    assert [trajectory.get_final_response() for trajectory in seen] == ["1", "1"]
    moves = [
        (event["entity"], event["from_state"], event["to_state"])
        for event in story.rows(
            "SELECT * FROM events WHERE run_id = :run_id AND reason = 'rescored' ORDER BY seq"
        )
    ]
    assert moves.count(("rollout", "failed", "succeeded")) == 2
    assert moves.count(("group", "dropped", "open")) == 1


def test_the_scorer_sees_the_whole_trajectory_again(engine, make_worker, payloads):
    break_judge()
    story = StoredRun(engine, reward="judge", agent="react", tools=("calculator",))
    make_worker("Action: calculator(expression='6 * 7')", "Final Answer: 42").work(story)
    (trajectory, *_) = [*mend_judge_and_ask(story, payloads)]
    assert [step.step_type.value for step in trajectory.steps] == [
        "observation",
        "action",
        "action_result",
        "final_answer",
    ]
    assert trajectory.metadata["tools"] == {"calculator": {"calls": 1, "errors": 0}}
    assert trajectory.metadata["stop_reason"] == "answered"
    assert trajectory.get_messages()[0]["role"] == "system"


def mend_judge_and_ask(story: StoredRun, payloads: FolderPayloads) -> list[Trajectory]:
    seen = mend_judge()
    ask_again(story, payloads)
    return seen


def test_saying_it_twice_changes_nothing(engine, make_worker, payloads):
    story = failed_in_scoring(engine, make_worker("1"))
    mend_judge()
    said = ask_again(story, payloads)
    before = story.everything()
    take_in(story, said)
    take_in(story, [*said, *said])
    assert story.everything() == before


def test_a_judge_that_is_still_away_changes_nothing_but_its_verdict(engine, make_worker, payloads):
    story = failed_in_scoring(engine, make_worker("1"))
    before = story.everything()
    (said,) = ask_again(story, payloads)
    assert said.error is not None
    assert "the judge is away" in said.error.message
    assert story.everything() == before


def test_another_reward_is_kept_beside_and_decides_nothing(engine, make_worker, payloads):
    story = failed_in_scoring(engine, make_worker("1"))
    ask_again(story, payloads, reward="numeric")
    assert set(story.states()) == {"failed"}
    assert ("numeric", "1", 1.0, "ok", None) in rewards(story)


def test_a_good_rollout_keeps_the_reward_it_has(engine, make_worker, payloads):
    mend_judge()
    story = StoredRun(engine, reward="judge")
    make_worker("0").work(story)
    before = story.rollouts(), story.groups()
    mend_judge(version="2")
    ask_again(story, payloads)
    assert (story.rollouts(), story.groups()) == before
    versions = {(name, version) for name, version, *_ in rewards(story)}
    assert versions == {(n, v) for n in ("judge", "judge.length") for v in ("1", "2")}


def test_behind_a_trainer_nothing_changes(engine, make_worker, payloads):
    break_judge()
    story = StoredRun(engine, n=2, n_min=1, reward="judge")
    worker = make_worker("1")
    first, second = story.claim()
    story.record(worker.say(story, first), story.succeeded(second))
    trainer = TrainerClient(engine, run=story.run.slug)
    trainer.pull(0, BatchSpec(groups=1, min_group_size=1))
    before = story.rollouts(), story.groups()
    mend_judge()
    ask_again(story, payloads, error_class=SCORING)
    assert (story.rollouts(), story.groups()) == before
    assert ("judge", "1", 1.0, "ok", None) in rewards(story), "the value is kept all the same"
    trainer.commit(0)


def test_a_ready_group_takes_one_more_and_counts_again(engine, make_worker, payloads):
    break_judge()
    story = StoredRun(engine, n=2, n_min=1, reward="judge")
    first, second = story.claim()
    story.record(make_worker("1").say(story, first), story.succeeded(second, reward=0.0))
    assert story.groups()[0]["reward_mean"] == 0.0
    mend_judge()
    ask_again(story, payloads, error_class=SCORING)
    (group,) = story.groups()
    assert (group["state"], group["n_succeeded"], group["reward_mean"]) == ("ready", 2, 0.5)


def test_a_group_dropped_for_another_reason_stays_dropped(engine, make_worker, payloads):
    break_judge()
    story = StoredRun(engine, n=2, reward="judge")
    (first,) = story.claim(1)
    story.record(make_worker("1").say(story, first))
    transact(engine, lambda c: begin_cancel(c, story.run))
    transact(engine, lambda c: cancel_rollouts(c, story.run))
    mend_judge()
    ask_again(story, payloads)
    assert story.groups()[0]["drop_reason"] == "cancelled"
    assert story.states() == {"failed": 1, "cancelled": 1}


def test_only_whole_trajectories_are_scored_again(engine, make_worker):
    story = StoredRun(engine, prompts=2, max_attempts=1)
    good, bad = story.claim()
    story.record(story.succeeded(good), story.failed(bad, ErrorClass.AGENT_BUG))
    count = transact(engine, lambda c: count_rescorable(c, story.run))
    of_class = transact(
        engine, lambda c: count_rescorable(c, story.run, error_class=ErrorClass.AGENT_BUG)
    )
    assert (count, of_class) == (1, 0)


@pytest.mark.parametrize("inline_bytes", [0, 1_000_000], ids=["by reference", "inline"])
def test_another_trajectory_than_the_accepted_one_is_not_scored(
    engine, make_worker, payloads, inline_bytes
):
    story = failed_in_scoring(engine, make_worker("1"))
    mend_judge()
    (stored,) = transact(engine, lambda c: read_rescorable(c, story.run))
    assert stored.body_digest == digest_of(stored.body or b"")
    stored = replace(stored, body=pack_record(TrajectoryRecord()))
    request = rescore_request_of(story.run, stored, "judge", payloads, inline_bytes=inline_bytes)
    said = asyncio.run(rescore(request, payloads, "w"))
    assert said.error is not None
    assert said.error.code == "no_trajectory"
    assert "not the one that was accepted" in said.error.message


def test_a_trajectory_whose_object_is_gone_is_an_error_of_its_own(engine, make_worker, payloads):
    story = failed_in_scoring(engine, make_worker("1"))
    mend_judge()
    (stored,) = transact(engine, lambda c: read_rescorable(c, story.run))
    request = rescore_request_of(story.run, stored, "judge", payloads, inline_bytes=0)
    assert request.body_uri is not None
    Path(request.body_uri.removeprefix("file://")).unlink()
    said = asyncio.run(rescore(request, payloads, "w"))
    assert said.error is not None
    assert (said.error.error_class, said.error.code) == (SCORING, "no_trajectory")
