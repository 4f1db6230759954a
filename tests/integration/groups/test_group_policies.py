"""What a run wants of its groups: how many, how long, how many more; and that nothing is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sqlalchemy import Engine, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import RolloutState, RunState
from pipeline.contract.run import RunConfig
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.accounting import account, check_accounting
from pipeline.store.engine import transact
from pipeline.store.group_policy import CutReport, end_overdue_groups
from pipeline.store.operations import cancel_rollouts, continue_run, pause_run, retry_rollouts
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.store.runs import get_run
from pipeline.trainer.client import TrainerClient

BAD = ErrorClass.CONTRACT


def run_of(story: StoredRun) -> Any:
    return transact(story.engine, lambda c: get_run(c, story.run.slug))


def pass_deadlines(story: StoredRun, seconds: float = 3600) -> CutReport:
    """Let time pass for the groups, then let the reconciler look."""

    def work(connection: Any) -> CutReport:
        connection.execute(
            text("UPDATE groups SET deadline_at = deadline_at - make_interval(secs => :s)"),
            {"s": seconds},
        )
        return end_overdue_groups(connection, most=100)

    return transact(story.engine, work)


def outcomes(story: StoredRun, attempts: list[ClaimedAttempt], good: int) -> list[Any]:
    return [
        story.succeeded(a, reward=float(i)) if i < good else story.failed(a, BAD)
        for i, a in enumerate(attempts)
    ]


# Partial, full, fail_run


@pytest.mark.parametrize(
    ("config", "good", "state"),
    [
        ({}, 2, "ready"),
        ({}, 1, "dropped"),
        ({"n_min": 3}, 2, "dropped"),
        ({"n_min": 3}, 3, "ready"),
        ({"group_policy": "full"}, 3, "dropped"),
        ({"group_policy": "full"}, 4, "ready"),
    ],
)
def test_a_group_is_ready_with_as_many_usable_rollouts_as_its_policy_asks(
    tell, config, good, state
):
    story = tell(n=4, **config)
    story.record(*outcomes(story, story.claim(), good))
    (group,) = story.groups()
    assert (group["state"], group["n_succeeded"]) == (state, good)
    assert group["drop_reason"] == ("failed" if state == "dropped" else None)


def test_a_minimum_goes_with_partial_groups_only():
    assert RunConfig(n=4, group_policy="full", n_min=4).usable_min == 4
    with pytest.raises(ValidationError, match="n_min=2"):
        RunConfig(n=4, group_policy="full", n_min=2)


def test_a_run_that_needs_full_groups_pauses_at_the_first_that_falls_short(tell):
    story = tell(prompts=2, n=2, group_policy="fail_run")
    first, *_ = story.claim()
    report = story.record(story.failed(first, BAD))
    run = run_of(story)
    assert run.state is RunState.PAUSED
    assert "group g000000 cannot have its 2 usable rollouts" in run.state_reason
    assert report.paused == [f"Run {run.slug} is paused because {run.state_reason}."]
    (event,) = story.rows("SELECT * FROM events WHERE entity = 'run'")
    assert (event["from_state"], event["to_state"]) == ("active", "paused")


def test_a_paused_run_still_takes_in_what_is_under_way(tell):
    story = tell(n=3, group_policy="fail_run")
    attempts = story.claim()
    story.record(story.failed(attempts[0], BAD))
    story.record(story.succeeded(attempts[1]), story.succeeded(attempts[2]))
    assert story.states() == {"failed": 1, "succeeded": 2}
    assert story.groups()[0]["drop_reason"] == "failed"


# Replacement


def test_a_failed_rollout_is_replaced_as_long_as_the_group_may_grow(tell):
    story = tell(n=2, group_policy="full", replacements=1)
    good, bad = story.claim()
    story.record(story.succeeded(good), story.failed(bad, BAD))
    (group,) = story.groups()
    assert (group["state"], group["n_rollouts"], group["n_target"]) == ("open", 3, 2)
    replacement = story.claim_one()
    assert replacement.rollout_index == 2
    story.record(story.succeeded(replacement))
    assert story.groups()[0]["state"] == "ready"


def test_a_group_that_cannot_be_made_whole_is_not_grown(tell):
    story = tell(n=2, replacements=1)
    story.record(*outcomes(story, story.claim(), 0))
    (group,) = story.groups()
    assert (group["state"], group["n_rollouts"]) == ("dropped", 2)


def test_replacements_end_with_their_budget(tell):
    story = tell(n=2, n_min=1, replacements=2)
    for _ in range(4):
        claimed = story.claim()
        story.record(*[story.failed(a, BAD) for a in claimed[:1]])
        story.record(*[story.succeeded(a) for a in claimed[1:]])
    (group,) = story.groups()
    assert (group["n_rollouts"], group["n_failed"], group["n_succeeded"]) == (4, 3, 1)
    assert group["state"] == "ready"


def test_the_same_failure_said_twice_is_replaced_once(tell):
    story = tell(n=2, replacements=3)
    good, bad = story.claim()
    story.record(story.failed(bad, BAD), story.failed(bad, BAD))
    story.record(story.failed(bad, BAD))
    assert len(story.rollouts()) == 3
    story.record(story.succeeded(good), story.succeeded(story.claim_one()))


# Oversampling


def test_an_oversampled_group_is_ready_with_n_and_the_rest_is_cut(tell):
    story = tell(n=2, oversample=2)
    attempts = story.claim()
    assert len(attempts) == 4
    report = story.record(story.succeeded(attempts[3]), story.succeeded(attempts[1]))
    (group,) = story.groups()
    assert (group["state"], group["n_succeeded"]) == ("ready", 2)
    assert (group["n_cancelled"], group["n_cut"]) == (2, 2)
    assert sorted(report.stopped) == [
        f"{story.run.slug}-g000000-r0-a1",
        f"{story.run.slug}-g000000-r2-a1",
    ]
    states = {row["state"] for row in story.rows("SELECT state FROM attempts")}
    assert states == {"succeeded", "cancelled"}
    assert set(report.stopped) == set(story.beat(*attempts)), "a second command follows"


def test_what_is_queued_of_a_satisfied_group_is_never_dispatched(tell):
    story = tell(n=2, oversample=2)
    first, second = story.claim(2)
    report = story.record(story.succeeded(first), story.succeeded(second))
    assert report.stopped == []
    assert story.claim() == []
    assert story.states() == {"succeeded": 2, "cancelled": 2}


def test_more_successes_than_needed_in_one_batch_keep_the_group_at_n(tell):
    story = tell(n=2, oversample=2)
    report = story.record(*[story.succeeded(a) for a in story.claim()])
    assert (report.accepted, report.surplus) == (2, 2)
    (group,) = story.groups()
    assert (group["state"], group["n_succeeded"], group["n_cut"]) == ("ready", 2, 2)
    kept = story.rows("SELECT t.* FROM trajectories t JOIN rollouts USING (rollout_id)")
    assert len(kept) == 4, "a surplus trajectory is kept for audit"
    assert len(story.rows("SELECT * FROM attempts WHERE state = 'superseded'")) == 2


def test_a_late_answer_of_a_cut_rollout_changes_nothing(tell):
    story = tell(n=1, oversample=1)
    first, second = story.claim()
    story.record(story.succeeded(first))
    before = story.rollouts(), story.groups()
    assert story.record(story.succeeded(second, reward=9.0)).superseded == 1
    assert (story.rollouts(), story.groups()) == before


def test_oversampling_makes_up_for_failures(tell):
    story = tell(n=2, oversample=1, group_policy="full")
    attempts = story.claim()
    story.record(story.failed(attempts[0], BAD))
    story.record(story.succeeded(attempts[1]), story.succeeded(attempts[2]))
    assert story.groups()[0]["state"] == "ready"


def test_a_trainer_gets_exactly_n_of_an_oversampled_group(tell):
    story = tell(n=2, oversample=3)
    story.record(*[story.succeeded(a, reward=float(a.rollout_index)) for a in story.claim()])
    trainer = TrainerClient(story.engine, run=story.run.slug)
    (group,) = trainer.pull(0, BatchSpec(groups=1, require_full_groups=True)).groups
    assert (len(group.rollouts), group.n_target) == (2, 2)
    trainer.commit(0)


def test_the_share_that_was_cut_is_counted(tell):
    story = tell(prompts=2, n=2, oversample=2)
    story.record(*[story.succeeded(a) for a in story.claim(4)])
    with story.engine.connect() as connection:
        sums = account(connection, story.run.run_id)
    assert (sums.rollouts, sums.cut, sums.cut_share) == (8, 2, 0.25)
    assert str(sums) == "2 enqueued = 0 consumed + 0 leased + 1 ready + 1 open"


def test_what_was_cut_stays_cut(tell):
    story = tell(n=1, oversample=1)
    story.record(story.succeeded(story.claim(1)[0]))
    assert story.groups()[0]["n_cut"] == 1
    count = transact(
        story.engine,
        lambda c: retry_rollouts(c, story.run, RolloutFilter(), state=RolloutState.CANCELLED),
    )
    assert (count.allowed, count.refused) == (0, 1)


# Deadlines


def test_the_deadline_counts_from_the_first_dispatch(tell):
    story = tell(prompts=2, n=2, group_deadline_s=60)
    assert [g["deadline_at"] for g in story.groups()] == [None, None]
    story.claim(1)
    first, second = story.groups()
    assert second["deadline_at"] is None
    story.claim(1)
    assert story.groups()[0]["deadline_at"] == first["deadline_at"]


@pytest.mark.parametrize(("good", "state"), [(1, "dropped"), (2, "ready"), (3, "ready")])
def test_at_its_deadline_a_group_is_ready_or_dropped_as_it_is(tell, good, state):
    story = tell(n=4, group_deadline_s=60)
    attempts = story.claim()
    story.record(*[story.succeeded(a) for a in attempts[:good]])
    report = pass_deadlines(story)
    (group,) = story.groups()
    assert group["state"] == state
    assert group["drop_reason"] == ("deadline" if state == "dropped" else None)
    assert (group["n_cancelled"], group["n_cut"], report.cut) == (4 - good,) * 3
    assert len(report.stopped) == 4 - good


def test_before_its_deadline_a_group_is_left_alone(tell):
    story = tell(n=2, group_deadline_s=7200)
    story.claim()
    assert pass_deadlines(story).cut == 0
    assert story.groups()[0]["state"] == "open"


def test_deadlines_stand_still_while_a_run_is_paused(tell):
    story = tell(n=2, group_deadline_s=60)
    story.claim()
    (before,) = story.groups()
    transact(story.engine, lambda c: pause_run(c, story.run))
    assert pass_deadlines(story, 0).cut == 0
    with story.engine.begin() as connection:
        connection.execute(text("UPDATE events SET at = at - interval '1 hour'"))
    transact(story.engine, lambda c: continue_run(c, story.run))
    shift_s = (story.groups()[0]["deadline_at"] - before["deadline_at"]).total_seconds()
    assert 3600 <= shift_s < 3660


def test_a_deadline_that_passes_while_a_completion_is_recorded_decides_once(tell):
    story = tell(n=2, group_deadline_s=60)
    first, second = story.claim()
    story.record(story.succeeded(first), story.succeeded(second))
    assert pass_deadlines(story).groups_ready == 0
    assert story.groups()[0]["state"] == "ready"


def test_two_collectors_and_a_reconciler_cut_side_by_side(tell):
    story = tell(prompts=20, n=2, oversample=2, group_deadline_s=60)
    attempts = story.claim()
    assert len(attempts) == 80
    batches = [
        [story.succeeded(a) for a in attempts if a.rollout_index % 2 == half] for half in (0, 1)
    ]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(story.record, *batch) for batch in batches]
        waiting.append(pool.submit(pass_deadlines, story))
        for one in waiting:
            one.result(30)
    counts = {(g["state"], g["n_succeeded"]) for g in story.groups()}
    assert counts <= {("ready", 2), ("dropped", 0), ("dropped", 1)}


# Whatever happens, the books balance


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["claim", "good", "bad", "retryable", "lost", "deadline", "cancel"]),
        st.integers(0, 7),
    ),
    max_size=25,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    moves=MOVES,
    policy=st.sampled_from(["partial", "full", "fail_run"]),
    oversample=st.integers(0, 2),
    replacements=st.integers(0, 2),
)
def test_the_books_balance_after_every_move(
    engine: Engine, moves, policy, oversample, replacements
):
    story = StoredRun(
        engine,
        prompts=2,
        n=2,
        group_policy=policy,
        oversample=oversample,
        replacements=replacements,
        group_deadline_s=60,
        max_attempts=2,
        max_lost=2,
    )
    out: list[ClaimedAttempt] = []
    for move, number in moves:
        match move:
            case "claim":
                out += story.claim(number + 1)
            case "deadline":
                pass_deadlines(story)
            case "cancel" if number == 0:
                transact(engine, lambda c: cancel_rollouts(c, story.run))
            case "cancel":
                continue
            case _ if out:
                attempt = out[number % len(out)]
                story.record(
                    {
                        "good": lambda a: story.succeeded(a),
                        "bad": lambda a: story.failed(a, BAD),
                        "retryable": lambda a: story.failed(a),
                        "lost": lambda a: story.lost(a),
                    }[move](attempt)
                )
        with engine.connect() as connection:
            assert check_accounting(connection, story.run.run_id) == []
