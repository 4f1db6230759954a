"""`decide_after`: every row of the error table, every state, every budget."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import (
    ERROR_TABLE,
    Action,
    ErrorClass,
    ProcessDied,
    StaleCompletion,
)
from pipeline.contract.messages import Completion, ErrorRecord
from pipeline.contract.rollout import (
    ATTEMPT_TRANSITIONS,
    ISOLATED_FROM,
    ROLLOUT_TRANSITIONS,
    TERMINAL_ROLLOUT_STATES,
    AttemptState,
    RolloutState,
)
from pipeline.contract.run import RunConfig
from pipeline.retry import (
    HELD_NO_MORE,
    NEVER_HELD,
    RetryPolicy,
    Rollout,
    Transition,
    decide_after,
)

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
ID = uuid.UUID(int=1)
RUNNING = Rollout(ID, ID, ID, RolloutState.RUNNING, attempt_no=1, attempts_used=0, lost_count=0)


def says(
    error_class: ErrorClass | None = None,
    code: str = "c",
    *,
    attempt_no: int = 1,
    retry_after_s: float | None = None,
) -> Completion:
    error = None
    if error_class is not None:
        error = ErrorRecord(
            error_class=error_class, code=code, message="m", retry_after_s=retry_after_s
        )
    return Completion(
        run_id=ID,
        group_id=ID,
        rollout_id=ID,
        attempt_no=attempt_no,
        label="a",
        worker_id="w",
        outcome="failed" if error else "succeeded",
        error=error,
    )


def decide(
    rollout: Rollout, completion: Completion, *, jitter: float = 1.0, **policy: object
) -> Transition:
    return decide_after(
        rollout,
        completion,
        policy=RetryPolicy(**policy),  # pyright: ignore[reportArgumentType]
        now=NOW,
        jitter=jitter,
    )


@pytest.mark.parametrize(
    "state", [RolloutState.QUEUED, RolloutState.DISPATCHED, RolloutState.RUNNING]
)
def test_the_first_unscored_result_queues_its_rollout_and_uses_no_attempt(state):
    unscored = says(attempt_no=1).model_copy(update={"purpose": "unscored"})
    rollout = Rollout(ID, ID, ID, state, attempt_no=2, attempts_used=1, lost_count=1)
    result = decide(rollout, unscored)
    assert (result.attempt_state, result.rollout_state) == (
        AttemptState.SUCCEEDED,
        RolloutState.QUEUED,
    )
    assert (result.attempts_used, result.lost_count, result.unscored_no) == (1, 1, 1)
    assert result.not_before == NOW
    later = decide(replace(rollout, unscored_no=2), unscored)
    assert (later.attempt_state, later.rollout_state) == (AttemptState.SUPERSEDED, None)


EXPECTED = {
    # class: (attempt ends, rollout goes to, attempts used, lost, wait in seconds)
    ErrorClass.MODEL_RATE_LIMIT: (AttemptState.FAILED, RolloutState.QUEUED, 0, 0, 1.0),
    ErrorClass.MODEL_TRANSPORT: (AttemptState.FAILED, RolloutState.QUEUED, 1, 0, 1.0),
    ErrorClass.MODEL_BAD_REQUEST: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
    ErrorClass.CONTEXT_OVERFLOW: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
    ErrorClass.POLICY_LIMIT: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
    ErrorClass.AGENT_TIMEOUT: (AttemptState.TIMED_OUT, RolloutState.FAILED, 1, 0, None),
    ErrorClass.TOOL_ERROR: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
    ErrorClass.SANDBOX: (AttemptState.FAILED, RolloutState.QUEUED, 1, 0, 1.0),
    ErrorClass.REWARD_ERROR: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
    ErrorClass.WORKER_LOST: (AttemptState.LOST, RolloutState.QUEUED, 0, 1, 0.0),
    ErrorClass.WORKER_STOPPED: (AttemptState.CANCELLED, RolloutState.QUEUED, 0, 0, 0.0),
    ErrorClass.AGENT_BUG: (AttemptState.FAILED, RolloutState.QUEUED, 1, 0, 1.0),
    ErrorClass.CONTRACT: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
    ErrorClass.POISON: (AttemptState.FAILED, RolloutState.FAILED, 1, 0, None),
}


def test_the_expectations_below_cover_the_whole_error_table():
    assert set(EXPECTED) == set(ERROR_TABLE) == set(ErrorClass)


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_a_first_error_does_what_its_row_says(error_class):
    attempt_state, rollout_state, used, lost, wait_s = EXPECTED[error_class]
    result = decide(RUNNING, says(error_class))
    assert result.attempt_state is attempt_state
    assert result.rollout_state is rollout_state
    assert (result.attempts_used, result.lost_count) == (used, lost)
    assert result.error_class is error_class
    assert result.not_before == (None if wait_s is None else NOW + timedelta(seconds=wait_s))


@pytest.mark.parametrize(
    "error_class", [name for name, action in ERROR_TABLE.items() if action is Action.RETRY]
)
def test_an_error_at_the_last_attempt_is_final(error_class):
    at_last = replace(RUNNING, attempts_used=2, attempt_no=3)
    result = decide(at_last, says(error_class, attempt_no=3), max_attempts=3)
    assert result.rollout_state is RolloutState.FAILED
    assert result.attempts_used == 3
    assert result.error_class is error_class
    assert not result.dead_letter


def lost(code: str, *, attempt_no: int = 1) -> Completion:
    return says(ErrorClass.WORKER_LOST, code, attempt_no=attempt_no)


def test_the_last_own_process_that_dies_makes_a_rollout_poison():
    isolated = replace(RUNNING, lost_count=4, died_count=2, attempt_no=5)
    result = decide(isolated, lost(ProcessDied.code, attempt_no=5), max_lost=3)
    assert result.rollout_state is RolloutState.FAILED
    assert result.attempt_state is AttemptState.LOST
    assert result.error_class is ErrorClass.POISON
    assert (result.lost_count, result.died_count) == (5, 3)
    assert result.dead_letter


def test_the_death_of_an_own_process_is_retried_after_a_backoff():
    isolated = replace(RUNNING, lost_count=3, died_count=1, attempt_no=4)
    result = decide(isolated, lost(ProcessDied.code, attempt_no=4), max_lost=3, base_s=1.0)
    assert result.rollout_state is RolloutState.QUEUED
    assert result.not_before == NOW + timedelta(seconds=2)


def test_a_rollout_whose_own_process_died_stays_isolated():
    result = decide(RUNNING, lost(ProcessDied.code))
    assert (result.lost_count, result.died_count) == (ISOLATED_FROM, 1)


@pytest.mark.parametrize("code", [HELD_NO_MORE, "server_died"])
def test_a_rollout_that_is_lost_with_its_worker_is_no_poison(code):
    often = replace(RUNNING, lost_count=20, died_count=1, attempt_no=21)
    result = decide(often, lost(code, attempt_no=21), max_lost=2)
    assert result.rollout_state is RolloutState.QUEUED
    assert (result.lost_count, result.died_count) == (21, 1)
    assert result.not_before == NOW + timedelta(seconds=1)


def test_a_rollout_that_is_lost_without_end_fails_at_last_and_is_no_poison():
    often = replace(RUNNING, lost_count=49, attempt_no=50)
    result = decide(often, lost(HELD_NO_MORE, attempt_no=50), max_lost=3)
    assert result.rollout_state is RolloutState.FAILED
    assert result.error_class is ErrorClass.WORKER_LOST
    assert result.dead_letter
    patient = decide(often, lost(HELD_NO_MORE, attempt_no=50), max_lost=60)
    assert patient.rollout_state is RolloutState.QUEUED


def test_a_request_that_no_worker_announced_leads_to_isolation_and_never_to_a_failure():
    """It may have killed its worker at once; or no worker serves its queue, while others die."""
    rollout = RUNNING
    for attempt_no in range(1, 200):
        result = decide(rollout, lost(NEVER_HELD, attempt_no=attempt_no), max_lost=1)
        assert result.rollout_state is RolloutState.QUEUED
        assert result.not_before == NOW
        assert result.lost_count == min(attempt_no, ISOLATED_FROM)
        rollout = replace(rollout, attempt_no=attempt_no + 1, lost_count=result.lost_count)
    assert rollout.died_count == 0


@pytest.mark.parametrize("error_class", [ErrorClass.MODEL_RATE_LIMIT, ErrorClass.WORKER_STOPPED])
def test_waits_and_hand_backs_are_never_final(error_class):
    result = decide(
        replace(RUNNING, attempt_no=999, attempts_used=2, lost_count=2),
        says(error_class, attempt_no=999),
        max_attempts=3,
        max_lost=3,
    )
    assert result.rollout_state is RolloutState.QUEUED
    assert (result.attempts_used, result.lost_count) == (2, 2)


def test_a_hand_back_is_queued_again_at_once():
    assert decide(RUNNING, says(ErrorClass.WORKER_STOPPED)).not_before == NOW


def test_a_run_can_ask_for_another_action():
    override = {ErrorClass.SANDBOX: Action.FAIL, ErrorClass.MODEL_BAD_REQUEST: Action.RETRY}
    assert decide(RUNNING, says(ErrorClass.SANDBOX), on_error=override).rollout_state == "failed"
    assert (
        decide(RUNNING, says(ErrorClass.MODEL_BAD_REQUEST), on_error=override).rollout_state
        == "queued"
    )


def test_the_policy_of_a_run_is_what_its_config_says():
    config = RunConfig(
        max_attempts=5,
        max_lost=2,
        backoff_base_s=0.5,
        backoff_max_s=9,
        on_error={ErrorClass.SANDBOX: Action.FAIL},
    )
    assert RetryPolicy.of(config) == RetryPolicy(5, 2, 0.5, 9, {ErrorClass.SANDBOX: Action.FAIL})


def test_what_the_server_asks_us_to_wait_is_waited():
    result = decide(RUNNING, says(ErrorClass.MODEL_RATE_LIMIT, retry_after_s=90), jitter=0.0)
    assert result.not_before == NOW + timedelta(seconds=90)


def test_backoff_doubles_and_is_capped():
    waits = [
        decide(
            replace(RUNNING, attempts_used=used),
            says(ErrorClass.MODEL_TRANSPORT),
            max_attempts=100,
            base_s=1.0,
            max_s=60.0,
        ).not_before
        for used in range(9)
    ]
    seconds = [(at - NOW).total_seconds() for at in waits if at]
    assert seconds == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@given(jitter=st.floats(0, 1, exclude_max=True), used=st.integers(0, 10_000))
def test_jitter_only_ever_shortens_the_wait(jitter, used):
    result = decide(
        replace(RUNNING, attempts_used=used),
        says(ErrorClass.MODEL_TRANSPORT),
        jitter=jitter,
        max_attempts=20_000,
    )
    assert result.not_before is not None
    assert NOW <= result.not_before <= NOW + timedelta(seconds=60)


@pytest.mark.parametrize("state", sorted(set(RolloutState) - TERMINAL_ROLLOUT_STATES))
@pytest.mark.parametrize("attempt_no", [1, 2])
def test_a_success_of_any_attempt_wins_while_nothing_is_decided(state, attempt_no):
    result = decide(replace(RUNNING, state=state, attempt_no=2), says(attempt_no=attempt_no))
    assert result.attempt_state is AttemptState.SUCCEEDED
    assert result.rollout_state is RolloutState.SUCCEEDED
    assert result.attempts_used == 1


@pytest.mark.parametrize("state", sorted(TERMINAL_ROLLOUT_STATES))
@pytest.mark.parametrize("error_class", [None, ErrorClass.MODEL_TRANSPORT])
def test_nothing_changes_a_decided_rollout(state, error_class):
    with pytest.raises(StaleCompletion, match=str(state)):
        decide(replace(RUNNING, state=state), says(error_class))


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_an_error_of_an_attempt_that_was_given_up_changes_nothing(error_class):
    newer = replace(RUNNING, attempt_no=2, lost_count=1)
    result = decide(newer, says(error_class, attempt_no=1))
    assert result.attempt_state is AttemptState.SUPERSEDED
    assert result.rollout_state is None


rollouts = st.builds(
    Rollout,
    rollout_id=st.just(ID),
    group_id=st.just(ID),
    run_id=st.just(ID),
    state=st.sampled_from(RolloutState),
    attempt_no=st.integers(1, 20),
    attempts_used=st.integers(0, 5),
    lost_count=st.integers(0, 60),
    died_count=st.integers(0, 5),
)
policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 6),
    max_lost=st.integers(1, 6),
    base_s=st.floats(0, 10),
    max_s=st.floats(0, 100),
    on_error=st.dictionaries(
        st.sampled_from(ErrorClass),
        st.sampled_from([Action.RETRY, Action.RETRY_FREE, Action.FAIL]),
        max_size=3,
    ),
)


@given(
    rollout=rollouts,
    policy=policies,
    error_class=st.none() | st.sampled_from(ErrorClass),
    code=st.sampled_from([HELD_NO_MORE, NEVER_HELD, ProcessDied.code]),
    attempt_no=st.integers(1, 20),
    retry_after_s=st.none() | st.floats(0, 1000),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_no_decision_breaks_a_table_or_a_budget(
    rollout, policy, error_class, code, attempt_no, retry_after_s, jitter
):
    completion = says(error_class, code, attempt_no=attempt_no, retry_after_s=retry_after_s)
    try:
        result = decide_after(rollout, completion, policy=policy, now=NOW, jitter=jitter)
    except StaleCompletion:
        assert rollout.state in TERMINAL_ROLLOUT_STATES
        return
    assert rollout.state not in TERMINAL_ROLLOUT_STATES
    assert result.attempt_state in ATTEMPT_TRANSITIONS[AttemptState.RUNNING]
    if result.rollout_state is None:
        assert result.attempt_state is AttemptState.SUPERSEDED
        return
    assert result.rollout_state in ROLLOUT_TRANSITIONS[rollout.state]
    spent = result.attempts_used - rollout.attempts_used
    lost = result.lost_count - rollout.lost_count
    died = result.died_count - rollout.died_count
    assert (spent, lost, died) in {(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 1)}
    if result.retries:
        assert result.not_before is not None
        assert result.not_before >= NOW
        assert not spent or result.attempts_used < policy.max_attempts
        assert not died or result.died_count < policy.max_lost
    assert (result.rollout_state is RolloutState.SUCCEEDED) == (error_class is None)
    assert result.dead_letter == (result.rollout_state is RolloutState.FAILED and bool(lost))
    assert not died or result.dead_letter == (result.error_class is ErrorClass.POISON)


@given(policy=policies, errors=st.lists(st.sampled_from(ErrorClass), min_size=1, max_size=40))
def test_a_rollout_that_only_fails_ends_within_its_budgets(policy, errors):
    rollout = RUNNING
    for error_class in errors:
        completion = says(error_class, ProcessDied.code, attempt_no=rollout.attempt_no)
        result = decide_after(rollout, completion, policy=policy, now=NOW)
        assert result.attempts_used <= policy.max_attempts
        assert result.died_count <= policy.max_lost
        if not result.retries:
            return
        rollout = replace(
            rollout,
            attempt_no=rollout.attempt_no + 1,
            attempts_used=result.attempts_used,
            lost_count=result.lost_count,
            died_count=result.died_count,
        )
    counted = rollout.attempts_used + rollout.died_count
    assert counted <= policy.max_attempts + policy.max_lost - 2
