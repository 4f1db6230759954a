"""The decision about a rollout after a completion: retry, fail or succeed, as a pure function.

`pipeline/store/outcomes.py` calls it when it records outcomes: completions of workers, and those
that the reconciler makes for lost attempts. Must not: read a clock, a database or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from pipeline.contract.errors import (
    ERROR_TABLE,
    Action,
    ErrorClass,
    ProcessDied,
    StaleCompletion,
)
from pipeline.contract.messages import Completion
from pipeline.contract.rollout import (
    ISOLATED_FROM,
    TERMINAL_ROLLOUT_STATES,
    AttemptState,
    RolloutState,
    require_transition,
)
from pipeline.contract.run import RunConfig

#: Codes of `worker_lost` that the reconciler gives: the worker that listed the attempt died or
#: lists it no more, or no worker ever listed it.
HELD_NO_MORE = "held_no_more"
NEVER_HELD = "never_held"

#: Losses after which a rollout fails although it may be the cause of none; more if `max_lost` is.
_MOST_LOST = 50

#: Longest wait that a server can ask for with `retry_after_s`.
_MOST_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """The stored state of a rollout, as far as the decision needs it."""

    rollout_id: UUID
    group_id: UUID
    run_id: UUID
    state: RolloutState
    attempt_no: int
    attempts_used: int
    lost_count: int
    died_count: int = 0
    unscored_no: int | None = None  #: the attempt whose trajectory waits for its reward


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Budgets and backoff of a run."""

    max_attempts: int = 3
    max_lost: int = 3
    base_s: float = 1.0
    max_s: float = 60.0
    on_error: Mapping[ErrorClass, Action] = field(default_factory=dict[ErrorClass, Action])

    @classmethod
    def of(cls, config: RunConfig) -> RetryPolicy:
        """Return the policy in a run's configuration."""
        return cls(
            max_attempts=config.max_attempts,
            max_lost=config.max_lost,
            base_s=config.backoff_base_s,
            max_s=config.backoff_max_s,
            on_error=_actions_of(config),
        )

    def action_for(self, error_class: ErrorClass) -> Action:
        """Return the action of an error of this class."""
        return self.on_error.get(error_class, ERROR_TABLE[error_class])

    def backoff_s(self, failures: int, *, jitter: float) -> float:
        """Return the wait before the next attempt: exponential, full jitter, capped."""
        if failures < 1:
            return 0.0
        return min(self.max_s, self.base_s * 2 ** min(failures - 1, 30)) * jitter


def _actions_of(config: RunConfig) -> Mapping[ErrorClass, Action]:
    if config.agentcore is None:
        return config.on_error
    # A session that gave no result in time leaves no trajectory that could be scored.
    return {ErrorClass.AGENT_TIMEOUT: Action.RETRY, **config.on_error}


@dataclass(frozen=True, slots=True)
class Transition:
    """New states of an attempt and its rollout; `rollout_state` None: the rollout is unchanged."""

    attempt_state: AttemptState
    rollout_state: RolloutState | None = None
    attempts_used: int = 0
    lost_count: int = 0
    died_count: int = 0
    unscored_no: int | None = None  #: None: as before
    not_before: datetime | None = None
    error_class: ErrorClass | None = None
    reason: str = ""
    dead_letter: bool = False

    @property
    def retries(self) -> bool:
        """Whether another attempt follows."""
        return self.rollout_state is RolloutState.QUEUED


def decide_after(
    rollout: Rollout,
    completion: Completion,
    *,
    policy: RetryPolicy,
    now: datetime,
    jitter: float = 1.0,
) -> Transition:
    """Decide the transition after a completion; reads no clock and no database.

    A success of any attempt wins while the rollout is not terminal. An unscored trajectory queues
    the rollout again and uses no attempt: the next attempts score the first one that came. An error
    of an attempt that is no longer the current one changes nothing, because the attempt was counted
    when it was given up. A wait or a hand-back uses no attempt; an error at `attempts_used ==
    max_attempts` is final.

    Args:
        rollout: The rollout as stored.
        completion: From a worker, or from the reconciler for a lost attempt.
        policy: Budgets and backoff of the run.
        now: The database's clock.
        jitter: Uniform in [0, 1); scales the backoff.

    Raises:
        StaleCompletion: The rollout's outcome is already decided.
    """
    if rollout.state in TERMINAL_ROLLOUT_STATES:
        raise StaleCompletion(
            f"{completion.label} answered after its rollout was {rollout.state}.",
            why="Its result is kept for audit and never trained.",
        )
    if completion.purpose == "unscored":
        return _unscored(rollout, completion, now)
    if completion.outcome == "succeeded":
        return _succeeded(rollout)
    assert completion.error is not None
    if completion.attempt_no != rollout.attempt_no or rollout.state is RolloutState.QUEUED:
        return Transition(AttemptState.SUPERSEDED, reason="late_error")
    return _after_error(rollout, completion, policy=policy, now=now, jitter=jitter)


def _succeeded(rollout: Rollout) -> Transition:
    require_transition(rollout.state, RolloutState.SUCCEEDED)
    return Transition(
        AttemptState.SUCCEEDED,
        RolloutState.SUCCEEDED,
        attempts_used=rollout.attempts_used + 1,
        lost_count=rollout.lost_count,
        died_count=rollout.died_count,
    )


def _unscored(rollout: Rollout, completion: Completion, now: datetime) -> Transition:
    if rollout.unscored_no is not None:
        return Transition(AttemptState.SUPERSEDED, reason="late_result")
    require_transition(rollout.state, RolloutState.QUEUED)
    return Transition(
        AttemptState.SUCCEEDED,
        RolloutState.QUEUED,
        attempts_used=rollout.attempts_used,
        lost_count=rollout.lost_count,
        died_count=rollout.died_count,
        unscored_no=completion.attempt_no,
        not_before=now,
        reason="unscored",
    )


def _after_error(
    rollout: Rollout,
    completion: Completion,
    *,
    policy: RetryPolicy,
    now: datetime,
    jitter: float,
) -> Transition:
    assert completion.error is not None
    error_class = completion.error.error_class
    action = policy.action_for(error_class)
    attempt_state = _ATTEMPT_STATES.get(error_class, AttemptState.FAILED)
    used, lost, died = rollout.attempts_used, rollout.lost_count, rollout.died_count
    if action is Action.RETRY_LOST:
        code = completion.error.code
        # A rollout may kill its worker before the worker lists it. But requests can get lost in
        # any number without their rollouts' fault, so these losses lead to isolation only.
        lost += code != NEVER_HELD or lost < ISOLATED_FROM
        if code == ProcessDied.code:
            # The request may have been isolated because its broker had delivered it before.
            died, lost = died + 1, max(lost, ISOLATED_FROM)
        final = died >= policy.max_lost or lost >= max(_MOST_LOST, policy.max_lost)
        # A lost attempt needs no further wait, because its lease has passed.
        failures = died
    elif action is Action.RETRY_FREE:
        final = False
        # `attempts_used` does not count these waits, so the backoff grows with the attempt number.
        failures = 0 if error_class is ErrorClass.WORKER_STOPPED else rollout.attempt_no
    else:
        used += 1
        final = action is not Action.RETRY or used >= policy.max_attempts
        failures = used
    if action is Action.RETRY_LOST and died >= policy.max_lost:
        error_class = ErrorClass.POISON
    rollout_state = RolloutState.FAILED if final else RolloutState.QUEUED
    require_transition(rollout.state, rollout_state)
    asked_s = min(max(completion.error.retry_after_s or 0.0, 0.0), _MOST_WAIT_S)
    wait_s = max(asked_s, policy.backoff_s(failures, jitter=jitter))
    return Transition(
        attempt_state,
        rollout_state,
        attempts_used=used,
        lost_count=lost,
        died_count=died,
        not_before=None if final else now + timedelta(seconds=wait_s),
        error_class=error_class,
        reason=str(error_class),
        dead_letter=final and action is Action.RETRY_LOST,
    )


_ATTEMPT_STATES = {
    ErrorClass.WORKER_LOST: AttemptState.LOST,
    ErrorClass.AGENT_TIMEOUT: AttemptState.TIMED_OUT,
    ErrorClass.WORKER_STOPPED: AttemptState.CANCELLED,
}
