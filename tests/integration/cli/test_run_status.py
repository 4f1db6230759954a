"""The figures of a run, out of a real store."""

from __future__ import annotations

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import RunState
from pipeline.store.engine import transact
from pipeline.store.operations import begin_cancel, cancel_rollouts
from pipeline.store.status import RunStatus, run_state, run_stats, run_status


def status_of(story: StoredRun) -> RunStatus:
    return transact(story.engine, lambda c: run_status(c, story.run))


def test_the_document_has_the_keys_that_others_rely_on_in_their_order(engine: Engine):
    document = status_of(StoredRun(engine, prompts=2, n=3)).to_json()
    assert list(document) == [
        "run",
        "state",
        "state_reason",
        "groups",
        "rollouts",
        "reward",
        "attempts",
        "retries",
        "errors",
        "model_calls",
        "tools",
        "tokens",
        "elapsed_s",
        "accounting",
        "waits",
        "scores",
        "warnings",
        "trainer",
        "zero_variance",
    ]
    assert document["groups"] == {
        "open": 2,
        "ready": 0,
        "leased": 0,
        "consumed": 0,
        "dropped": 0,
    }
    assert document["rollouts"] == {
        "total": 6,
        "queued": 6,
        "dispatched": 0,
        "running": 0,
        "succeeded": 0,
        "failed": 0,
        "cancelled": 0,
    }
    assert document["accounting"] == {
        "enqueued": 2,
        "consumed": 0,
        "leased": 0,
        "ready": 0,
        "open": 2,
        "dropped": {},
        "adds_up": True,
        "rollouts_cut": 0,
    }
    assert document["reward"] == {
        "n": 0,
        "mean": None,
        "std": None,
        "stderr": None,
        "prompts": 0,
    }
    assert document["tokens"] == {
        "prompt": 0,
        "completion": 0,
        "saved": 0,
        "rollouts_with_ids": 0,
    }


def test_outcomes_are_counted_with_their_reward_tokens_and_errors(engine: Engine):
    story = StoredRun(engine, prompts=1, n=4, n_min=2)
    a, b, c, d = story.claim()
    story.record(
        story.succeeded(a, 1.0),
        story.succeeded(b, 0.0),
        story.succeeded(c, 1.0),
        story.failed(d, ErrorClass.CONTRACT),
    )
    found = status_of(story)
    assert found.state is RunState.FINISHED
    assert found.is_done
    assert (found.rollouts["succeeded"], found.rollouts["failed"]) == (3, 1)
    assert found.groups["ready"] == 1
    assert found.reward_n == 3
    assert found.reward_mean == pytest.approx(2 / 3)
    assert found.reward_std == pytest.approx((2 / 9) ** 0.5)
    assert found.errors == {"contract": 1}
    assert (found.prompt_tokens, found.completion_tokens) == (33, 9)
    assert found.attempts == 4
    assert found.waits == ()


def test_a_retry_counts_as_an_attempt_and_is_waited_for(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1, backoff_base_s=3600.0, backoff_max_s=3600.0)
    story.record(story.failed(story.claim_one(), ErrorClass.MODEL_TRANSPORT))
    with engine.begin() as connection:
        connection.execute(text("UPDATE rollouts SET not_before = now() + interval '1 hour'"))
    found = status_of(story)
    assert (found.attempts, found.retries) == (1, 1)
    assert found.errors == {}
    assert any("waits for a retry" in sentence for sentence in found.waits)


def test_running_rollouts_say_for_how_long(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    story.beat(story.claim_one())
    found = status_of(story)
    assert found.rollouts["running"] == 1
    assert found.oldest_running_s is not None
    assert found.live_workers == 1
    assert any("running, the oldest for" in sentence for sentence in found.waits)


def test_a_run_is_not_finished_while_prompts_are_announced(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    story.record(story.succeeded(story.claim_one()))
    with engine.begin() as connection:
        connection.execute(text("UPDATE runs SET sealed_at = NULL"))
    found = status_of(story)
    assert found.state is RunState.ACTIVE
    assert not found.is_done


def test_the_quick_look_agrees_with_the_whole_one(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)

    def both() -> tuple[RunState, RunState]:
        return status_of(story).state, transact(engine, lambda c: run_state(c, story.run))

    assert both() == (RunState.ACTIVE, RunState.ACTIVE)
    attempt = story.claim_one()
    assert both() == (RunState.ACTIVE, RunState.ACTIVE)
    story.record(story.succeeded(attempt))
    assert both() == (RunState.FINISHED, RunState.FINISHED)


def test_a_cancelled_run_is_done_when_nothing_of_it_is_open(engine: Engine):
    story = StoredRun(engine, prompts=1, n=2)
    transact(engine, lambda c: begin_cancel(c, story.run))
    assert not status_of(story).is_done
    transact(engine, lambda c: cancel_rollouts(c, story.run))
    found = status_of(story)
    assert found.state is RunState.CANCELLED
    assert found.is_done


def test_one_runs_figures_leave_out_those_of_others(engine: Engine):
    other = StoredRun(engine, prompts=3, n=2)
    other.record(*(other.succeeded(attempt) for attempt in other.claim()))
    found = status_of(StoredRun(engine, prompts=1, n=1))
    assert found.rollouts["total"] == 1
    assert found.attempts == found.reward_n == found.prompt_tokens == 0


def test_the_trainers_figures_are_the_same(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    stats = transact(engine, lambda c: run_stats(c, story.run, consumer="trainer"))
    found = status_of(story)
    assert (stats.run, stats.state) == (found.run, str(found.state))
    assert (stats.groups, stats.rollouts, stats.waits) == (
        found.groups,
        found.rollouts,
        found.waits,
    )
    assert not stats.drained
