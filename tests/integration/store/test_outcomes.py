"""Outcomes into the store: once each, in any order, with every count right."""

from __future__ import annotations

import pytest
from fixtures.stored_run import StoredRun

from pipeline.contract.errors import ERROR_TABLE, Action, ErrorClass
from pipeline.contract.messages import RewardPart
from pipeline.contract.rollout import RunPurpose
from pipeline.contract.trajectory import unpack_record
from pipeline.requests import request_of
from pipeline.store.engine import READY_CHANNEL, WORK_CHANNEL, Listener


def test_a_success_is_stored_with_all_that_was_said(engine):
    story = StoredRun(engine)
    attempt = story.claim_one()
    said = story.succeeded(
        attempt,
        0.5,
        n_turns=3,
        timings={"elapsed_s": 1.5},
        reward_parts=(
            RewardPart(name="numeric", value=0.5),
            RewardPart(name="numeric.form", value=None, status="error"),
        ),
    )
    report = story.record(said)
    assert (report.accepted, report.groups_ready) == (1, 1)

    rollout = story.rollout(attempt)
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 0.5)
    assert rollout["stop_reason"] == "answered"
    assert (rollout["winner_attempt_no"], rollout["attempts_used"]) == (1, 1)
    assert rollout["finished_at"] is not None
    row = story.attempt(attempt)
    assert (row["state"], row["worker_id"], row["n_turns"]) == ("succeeded", "w1", 3)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (11, 3)
    assert row["timings"] == {"elapsed_s": 1.5}
    assert (row["ended_at"] - row["started_at"]).total_seconds() == pytest.approx(1.5)
    everything = story.everything()
    (trajectory,) = everything["trajectories"]
    assert unpack_record(bytes(trajectory["body"])).messages[0]["content"] == "7"
    assert [(part["name"], part["value"], part["status"]) for part in everything["rewards"]] == [
        ("numeric", 0.5, "ok"),
        ("numeric.form", None, "error"),
    ]
    assert [
        (event["entity"], event["from_state"], event["to_state"]) for event in everything["events"]
    ] == [
        ("rollout", "queued", "dispatched"),
        ("rollout", "dispatched", "succeeded"),
        ("group", "open", "ready"),
    ]


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_second_delivery_of_a_completion_changes_nothing(engine, outcome):
    story = StoredRun(engine, n=2)
    attempt = story.claim_one()
    said = getattr(story, outcome)(attempt)
    story.record(said)
    before = story.everything()
    report = story.record(said)
    assert report.duplicate == 1
    assert story.everything() == before


def test_second_delivery_within_one_batch_changes_nothing(engine):
    story = StoredRun(engine)
    said = story.succeeded(story.claim_one())
    report = story.record(said, said, said)
    assert (report.accepted, report.duplicate) == (1, 2)
    assert story.groups()[0]["n_succeeded"] == 1


def test_a_redelivery_with_another_outcome_changes_nothing(engine):
    story = StoredRun(engine, n=2)
    attempt = story.claim_one()
    story.record(story.succeeded(attempt, 1.0))
    before = story.everything()
    story.record(story.succeeded(attempt, 0.0), story.failed(attempt))
    assert story.everything() == before


def test_a_failed_rollout_has_no_reward_and_keeps_what_went_wrong(engine):
    story = StoredRun(engine, max_attempts=1)
    attempt = story.claim_one()
    report = story.record(story.failed(attempt, ErrorClass.SANDBOX, reward=1.0, body=b"partial"))
    assert report.failed == 1
    rollout = story.rollout(attempt)
    assert (rollout["state"], rollout["error_class"]) == ("failed", "sandbox")
    assert rollout["reward"] is None
    assert rollout["stop_reason"] is None
    row = story.attempt(attempt)
    assert (row["error_code"], row["error_message"]) == ("test", "It went wrong.")
    assert bytes(story.everything()["trajectories"][0]["body"]) == b"partial"


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_every_class_of_the_error_table_ends_or_repeats_an_attempt(engine, error_class):
    story = StoredRun(engine)
    attempt = story.claim_one()
    story.record(story.failed(attempt, error_class))
    retries = ERROR_TABLE[error_class] in (
        Action.RETRY,
        Action.RETRY_FREE,
        Action.RETRY_LOST,
    )
    assert story.rollout(attempt)["state"] == ("queued" if retries else "failed")
    assert story.attempt(attempt)["error_class"] == error_class
    assert len(story.claim()) == (1 if retries else 0)


def test_a_retry_waits_for_its_time(engine):
    story = StoredRun(engine, backoff_base_s=1000.0, backoff_max_s=1000.0)
    attempt = story.claim_one()
    said = story.failed(attempt)
    assert said.error is not None
    asked = said.error.model_copy(update={"retry_after_s": 500.0})
    story.record(said.model_copy(update={"error": asked}))
    assert story.claim() == []
    (row,) = story.rows(
        "SELECT extract(epoch FROM not_before - now()) AS wait FROM rollouts WHERE run_id = :run_id"
    )
    assert 490 <= float(row["wait"]) <= 1000


def test_budgets_end_a_rollout_that_only_fails(engine):
    story = StoredRun(engine, max_attempts=3)
    for attempt_no in (1, 2, 3):
        attempt = story.claim_one()
        assert attempt.attempt_no == attempt_no
        story.record(story.failed(attempt))
    assert story.claim() == []
    assert story.rollouts()[0]["attempts_used"] == 3
    assert story.rollouts()[0]["error_class"] == "model_transport"


def test_a_rollout_whose_own_processes_die_becomes_poison_and_a_dead_letter(engine):
    story = StoredRun(engine, max_lost=2)
    for _ in range(2):
        story.record(story.died(story.claim_one()))
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["error_class"]) == ("failed", "poison")
    (letter,) = story.rows("SELECT * FROM dead_letters WHERE run_id = :run_id")
    assert (letter["kind"], letter["rollout_id"]) == ("rollout", rollout["rollout_id"])
    assert letter["label"] == f"{story.run.slug}-g000000-r0-a2"
    assert letter["reason"] == "poison"


def test_workers_that_die_with_a_rollout_make_no_poison(engine):
    story = StoredRun(engine, max_lost=1)
    for _ in range(10):
        story.record(story.lost(story.claim_one()))
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["lost_count"], rollout["died_count"]) == ("queued", 10, 0)


def test_a_request_says_how_often_its_rollout_was_lost(engine):
    story = StoredRun(engine)
    for lost_count in range(3):
        attempt = story.claim_one()
        assert request_of(story.run, attempt).lost_count == lost_count
        story.record(story.lost(attempt))


def test_late_success_of_a_lost_attempt_wins(engine):
    story = StoredRun(engine)
    first = story.claim_one()
    story.record(story.lost(first))
    assert story.attempt(first)["state"] == "lost"
    report = story.record(story.succeeded(first))
    assert report.accepted == 1
    assert story.rollout(first)["state"] == "succeeded"
    assert story.attempt(first)["state"] == "succeeded"
    assert story.claim() == []


def test_late_success_overtakes_a_newer_attempt_that_still_runs(engine):
    story = StoredRun(engine)
    first = story.claim_one()
    story.record(story.lost(first))
    second = story.claim_one()
    story.record(story.succeeded(first))
    assert story.rollout(first)["winner_attempt_no"] == 1
    assert story.attempt(second)["state"] == "superseded"
    assert story.beat(second) == [f"{story.run.slug}-g000000-r0-a2"]


def test_late_success_after_a_newer_success_is_superseded_and_kept(engine):
    story = StoredRun(engine)
    first = story.claim_one()
    story.record(story.lost(first))
    second = story.claim_one()
    story.record(story.succeeded(second, 1.0))
    report = story.record(story.succeeded(first, 0.0, body=b"late"))
    assert report.superseded == 1
    rollout = story.rollout(first)
    assert (rollout["winner_attempt_no"], rollout["reward"]) == (2, 1.0)
    assert story.attempt(first)["state"] == "superseded"
    kept = {row["attempt_no"]: bytes(row["body"]) for row in story.everything()["trajectories"]}
    assert kept[1] == b"late"
    assert story.groups()[0]["n_succeeded"] == 1
    assert story.groups()[0]["reward_mean"] == 1.0


def test_late_success_after_the_rollout_failed_is_superseded_and_kept(engine):
    story = StoredRun(engine, max_lost=1)
    first = story.claim_one()
    story.record(story.died(first))
    report = story.record(story.succeeded(first))
    assert report.superseded == 1
    assert story.rollout(first)["state"] == "failed"
    assert story.rollout(first)["reward"] is None
    assert len(story.everything()["trajectories"]) == 1


def test_late_error_of_an_attempt_that_was_given_up_changes_nothing(engine):
    story = StoredRun(engine)
    first = story.claim_one()
    story.record(story.lost(first))
    second = story.claim_one()
    before = story.rollout(second)
    story.record(story.failed(first))
    assert story.rollout(second) == before
    assert story.attempt(first)["state"] == "superseded"


def test_a_stored_trajectory_never_changes(engine):
    story = StoredRun(engine)
    attempt = story.claim_one()
    story.record(story.lost(attempt))
    story.record(story.succeeded(attempt, body=b"first"))
    story.record(story.succeeded(attempt, body=b"second"))
    assert bytes(story.everything()["trajectories"][0]["body"]) == b"first"


def test_a_completion_of_an_attempt_never_dispatched_is_reported_unknown(engine):
    story = StoredRun(engine, n=2)
    attempt = story.claim_one()
    stranger = story.succeeded(attempt).model_copy(update={"attempt_no": 9})
    known = story.succeeded(attempt)
    report = story.record(stranger, known)
    assert [item.attempt_no for item in report.unknown] == [9]
    assert report.accepted == 1


def test_a_group_turns_ready_only_when_all_its_rollouts_are_terminal(engine):
    story = StoredRun(engine, n=3)
    attempts = story.claim()
    for number, attempt in enumerate(attempts):
        assert story.groups()[0]["state"] == "open"
        story.record(story.succeeded(attempt, float(number)))
    (group,) = story.groups()
    assert group["state"] == "ready"
    assert (group["n_succeeded"], group["n_failed"]) == (3, 0)
    assert group["reward_mean"] == 1.0
    assert group["reward_std"] == pytest.approx((2 / 3) ** 0.5)


def test_a_failed_rollout_never_enters_its_groups_statistics(engine):
    story = StoredRun(engine, n=3, max_attempts=1)
    first, second, third = story.claim()
    story.record(story.succeeded(first, 1.0), story.failed(second), story.succeeded(third, 1.0))
    (group,) = story.groups()
    assert group["state"] == "ready"
    assert (group["n_succeeded"], group["n_failed"]) == (2, 1)
    assert (group["reward_mean"], group["reward_std"]) == (1.0, 0.0)


def test_a_group_with_too_few_usable_rollouts_is_dropped_with_its_reason(engine):
    story = StoredRun(engine, n=3, n_min=2, max_attempts=1)
    first, second, third = story.claim()
    report = story.record(story.succeeded(first), story.failed(second), story.failed(third))
    assert (report.groups_ready, report.groups_dropped) == (0, 1)
    (group,) = story.groups()
    assert (group["state"], group["drop_reason"]) == ("dropped", "failed")


def test_unscored_rollouts_make_groups_without_statistics(engine):
    story = StoredRun(engine, n=2, reward=None, purpose=RunPurpose.EVAL)
    story.record(*(story.succeeded(attempt, None) for attempt in story.claim()))
    (group,) = story.groups()
    assert group["state"] == "ready"
    assert group["reward_mean"] is None


def test_one_batch_may_hold_outcomes_of_many_runs(engine):
    stories = [StoredRun(engine, prompts=2, n=2) for _ in range(3)]
    said = [story.succeeded(attempt) for story in stories for attempt in story.claim()]
    report = stories[0].record(*reversed(said))
    assert (report.accepted, report.groups_ready) == (12, 6)


def test_an_outcome_wakes_dispatcher_and_trainer(engine):
    story = StoredRun(engine, n=2)
    first, second = story.claim()
    work, ready = Listener(engine, WORK_CHANNEL), Listener(engine, READY_CHANNEL)
    assert work.wait(0)
    assert ready.wait(0)
    story.record(story.succeeded(first))
    assert work.wait(20)
    assert not ready.wait(0)
    story.record(story.succeeded(second))
    assert ready.wait(20)
    work.close()
    ready.close()
