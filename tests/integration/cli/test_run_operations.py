"""Cancel, pause, continue and retry, on a real store."""

from __future__ import annotations

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.contract.errors import ErrorClass, NotAllowed
from pipeline.contract.rollout import RolloutState, RunState
from pipeline.store.engine import transact
from pipeline.store.operations import (
    RetryCount,
    begin_cancel,
    cancel_rollouts,
    continue_run,
    count_retryable,
    pause_run,
    retry_rollouts,
)
from pipeline.store.rollout_filter import RolloutFilter, of_class, parse_filter
from pipeline.store.runs import active_runs, get_run


def cancel(story: StoredRun, *, most: int = 100) -> int:
    transact(story.engine, lambda c: begin_cancel(c, story.run, reason="test"))
    total = 0
    while some := transact(story.engine, lambda c: cancel_rollouts(c, story.run, most=most)):
        total += some
    return total


def retry(
    story: StoredRun,
    where: RolloutFilter | None = None,
    state: RolloutState = RolloutState.FAILED,
) -> RetryCount:
    where = where or RolloutFilter()
    told = transact(story.engine, lambda c: count_retryable(c, story.run, where, state=state))
    done = transact(story.engine, lambda c: retry_rollouts(c, story.run, where, state=state))
    assert told == done
    return done


def state_of(story: StoredRun) -> RunState:
    return transact(story.engine, lambda c: get_run(c, story.run.slug)).state


def finished_with_failures(engine: Engine, **config) -> StoredRun:
    """One group of three: two failures of different classes, one success."""
    story = StoredRun(engine, prompts=1, n=3, **config)
    a, b, c = story.claim()
    story.record(
        story.failed(a, ErrorClass.CONTRACT),
        story.failed(b, ErrorClass.MODEL_BAD_REQUEST),
        story.succeeded(c),
    )
    return story


def test_cancelling_ends_what_is_open_and_keeps_what_is_done(engine: Engine):
    story = StoredRun(engine, prompts=2, n=2)
    done, waiting, running = story.claim(3)
    story.record(story.succeeded(done))
    story.beat(running)
    assert cancel(story, most=2) == 3
    assert state_of(story) is RunState.CANCELLED
    assert story.states() == {"succeeded": 1, "cancelled": 3}
    assert story.attempt(waiting)["state"] == story.attempt(running)["state"] == "cancelled"
    assert [group["state"] for group in story.groups()] == ["dropped", "dropped"]
    assert {group["drop_reason"] for group in story.groups()} == {"cancelled"}


def test_a_worker_is_told_to_stop_what_was_cancelled(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    attempt = story.claim_one()
    story.beat(attempt)
    cancel(story)
    assert story.beat(attempt) == [f"{story.run.slug}-g000000-r0-a1"]


def test_a_completion_after_the_cancelling_changes_nothing(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    attempt = story.claim_one()
    cancel(story)
    story.record(story.succeeded(attempt))
    assert story.states() == {"cancelled": 1}
    assert story.groups()[0]["n_cancelled"] == 1


def test_cancelling_again_changes_nothing(engine: Engine):
    story = StoredRun(engine, prompts=1, n=2)
    cancel(story)
    before = story.everything()
    assert cancel(story) == 0
    assert story.everything() == before


def test_every_cancelled_rollout_has_its_event(engine: Engine):
    story = StoredRun(engine, prompts=1, n=2)
    story.claim_one()
    cancel(story)
    events = story.rows(
        "SELECT from_state FROM events WHERE run_id = :run_id AND entity = 'rollout'"
        " AND to_state = 'cancelled' ORDER BY from_state"
    )
    assert [event["from_state"] for event in events] == ["dispatched", "queued"]


def test_a_paused_run_is_not_handed_out_until_it_goes_on(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    assert transact(engine, lambda c: pause_run(c, story.run, reason="lunch"))
    assert not transact(engine, lambda c: pause_run(c, story.run))
    assert transact(engine, active_runs) == []
    assert transact(engine, lambda c: continue_run(c, story.run))
    assert not transact(engine, lambda c: continue_run(c, story.run))
    assert [run.slug for run in transact(engine, active_runs)] == [story.run.slug]


def test_a_cancelled_run_is_neither_paused_nor_continued(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    cancel(story)
    for operation in (pause_run, continue_run):
        with pytest.raises(NotAllowed, match="--cancelled"):
            transact(engine, lambda c, operation=operation: operation(c, story.run))


def test_a_retry_queues_failed_rollouts_with_their_whole_budget(engine: Engine):
    story = finished_with_failures(engine)
    assert [group["state"] for group in story.groups()] == ["dropped"]
    assert retry(story) == RetryCount(allowed=2, refused=0)
    assert story.states() == {"queued": 2, "succeeded": 1}
    for row in story.rollouts()[:2]:
        assert row["attempts_used"] == row["lost_count"] == 0
        assert row["error_class"] is row["finished_at"] is None
    (group,) = story.groups()
    assert (group["state"], group["drop_reason"], group["ready_at"]) == ("open", None, None)
    assert (group["n_succeeded"], group["n_failed"]) == (1, 0)


def test_a_group_is_ready_after_its_retries_succeed(engine: Engine):
    story = finished_with_failures(engine)
    retry(story)
    again = story.claim()
    assert [attempt.attempt_no for attempt in again] == [2, 2]
    story.record(*(story.succeeded(attempt) for attempt in again))
    (group,) = story.groups()
    assert (group["state"], group["n_succeeded"]) == ("ready", 3)


def test_a_ready_group_is_opened_for_a_retry(engine: Engine):
    story = finished_with_failures(engine, n_min=1)
    assert story.groups()[0]["state"] == "ready"
    retry(story)
    group = story.groups()[0]
    assert (group["state"], group["reward_mean"]) == ("open", None)


@pytest.mark.parametrize("state", ["leased", "consumed"])
def test_what_a_trainer_has_is_left_alone(engine: Engine, state: str):
    story = finished_with_failures(engine, n_min=1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE groups SET state = :state"), {"state": state})
    before = story.everything()
    assert retry(story) == RetryCount(allowed=0, refused=2)
    assert story.everything() == before


def test_only_the_chosen_class_is_retried(engine: Engine):
    story = finished_with_failures(engine)
    assert retry(story, of_class("contract")).allowed == 1
    assert story.states() == {"queued": 1, "failed": 1, "succeeded": 1}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("error_class == 'contract'", 1),
        ("error_class != 'contract'", 1),
        ("'went' in message and error_code == 'test'", 2),
        ("'nothing' in message", 0),
        ("not ('nothing' in message)", 2),
        ("index >= 1", 1),
        ("attempts > 1 or group == 0", 2),
        ("worker in ['w1', 'w2']", 2),
        ("worker not in ['w1']", 0),
        ("phase == None", 0),
        ("turns < 1 and tokens == 0 and lost == 0", 2),
        ("error_class < 'd'", 1),
    ],
)
def test_a_condition_chooses_what_is_retried(engine: Engine, condition: str, expected: int):
    story = finished_with_failures(engine)
    assert retry(story, parse_filter(condition)).allowed == expected


def test_cancelled_rollouts_can_be_taken_up_again(engine: Engine):
    story = StoredRun(engine, prompts=1, n=2)
    story.claim_one()
    cancel(story)
    assert retry(story, state=RolloutState.CANCELLED) == RetryCount(allowed=2, refused=0)
    assert state_of(story) is RunState.ACTIVE
    assert story.states() == {"queued": 2}
    assert story.groups()[0]["n_cancelled"] == 0
    story.record(*(story.succeeded(attempt) for attempt in story.claim()))
    assert story.groups()[0]["state"] == "ready"


def test_a_group_that_has_all_it_needs_is_left_alone(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1, oversample=2)
    a, b, _ = story.claim()
    story.record(story.failed(a, ErrorClass.CONTRACT))
    story.record(story.succeeded(b))
    assert story.states() == {"failed": 1, "succeeded": 1, "cancelled": 1}
    assert retry(story) == RetryCount(allowed=0, refused=1)
    assert retry(story, state=RolloutState.CANCELLED) == RetryCount(allowed=0, refused=1)
    assert story.groups()[0]["state"] == "ready"
