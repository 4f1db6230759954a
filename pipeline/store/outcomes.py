"""Ingest of outcomes: completions of attempts are applied to their rollouts and groups.

Used by the collector for completions and by the reconciler for silent attempts. One transaction
takes a whole batch: trajectory, rewards, attempt, rollout, group counters and events together.
Recording the same outcome again changes nothing.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import ErrorClass, StaleCompletion
from pipeline.contract.messages import Completion
from pipeline.contract.rollout import AttemptState, RolloutState, RunState
from pipeline.contract.run import RunConfig
from pipeline.retry import RetryPolicy, Rollout, Transition, decide_after
from pipeline.store.engine import READY_CHANNEL, WORK_CHANNEL, notify
from pipeline.store.group_policy import (
    CutReport,
    cut_satisfied,
    find_short_groups,
    lock_with_siblings,
    replace_failed,
)
from pipeline.store.groups import LockedGroup, add_to_counters, close_groups, lock_groups
from pipeline.store.outcome_rows import AttemptOutcome, write_outcomes
from pipeline.store.run_health import lock_judged_runs, pause_failing_runs, pause_short_runs


@dataclass(slots=True)
class OutcomeReport:
    """The effects of a batch of completions, counted."""

    accepted: int = 0
    retried: int = 0
    failed: int = 0
    superseded: int = 0
    duplicate: int = 0
    surplus: int = 0
    unknown: list[Completion] = field(default_factory=list[Completion])
    groups_ready: int = 0
    groups_dropped: int = 0
    #: Labels of attempts that workers should stop: their groups have enough.
    stopped: list[str] = field(default_factory=list[str])
    #: Sentences to log about runs that were paused.
    paused: list[str] = field(default_factory=list[str])


#: The transition of a success that its group does not need: stored for inspection, never trained.
_SURPLUS = Transition(AttemptState.SUPERSEDED, RolloutState.CANCELLED, reason="surplus")

#: An attempt in one of these states has been recorded; a second message about it is a repeat.
_RECORDED = frozenset(
    {
        AttemptState.SUCCEEDED,
        AttemptState.FAILED,
        AttemptState.TIMED_OUT,
        AttemptState.SUPERSEDED,
    }
)

_LOCK = text("""
SELECT rollout_id, group_id, run_id, state, attempt_no, attempts_used, lost_count, died_count,
       unscored_no, now() AS now
FROM rollouts WHERE rollout_id = ANY(:ids) ORDER BY rollout_id FOR UPDATE
""")

# Keep this a separate statement: under READ COMMITTED, rows joined to a row whose lock we waited
# for are read as they were before the wait.
_ATTEMPT_STATES = text("""
SELECT a.rollout_id, a.state
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS given (id, no)
JOIN attempts a ON a.rollout_id = given.id AND a.attempt_no = given.no
""")

_CONFIGS = text("SELECT run_id, config FROM runs WHERE run_id = ANY(:ids)")


def record_outcomes(connection: Connection, completions: Sequence[Completion]) -> OutcomeReport:
    """Record the outcomes of attempts; the caller commits, then acknowledges.

    Returns:
        Counts; `unknown` holds completions of attempts that this store did not dispatch.
    """
    report = OutcomeReport()
    if not completions:
        return report
    configs = _configs(connection, {completion.run_id for completion in completions})
    first, *later = _rounds(completions)
    rows = _lock_rollouts(connection, completions, configs)
    if later:
        # A later round must not take locks that come before those of an earlier one.
        lock_groups(connection, [row.group_id for row in rows])
        lock_judged_runs(connection, configs, configs, configs)
    _record(connection, first, rows, configs, report)
    for batch in later:
        ids = [completion.rollout_id for completion in batch]
        _record(connection, batch, connection.execute(_LOCK, {"ids": ids}), configs, report)
    if report.retried or report.accepted or report.failed or report.surplus:
        notify(connection, WORK_CHANNEL)
    if report.groups_ready or report.groups_dropped:
        notify(connection, READY_CHANNEL)
    return report


def _rounds(completions: Sequence[Completion]) -> list[list[Completion]]:
    """Split completions: those of one rollout are decided one after the other."""
    rounds: list[list[Completion]] = []
    seen: Counter[UUID] = Counter()
    for completion in completions:
        number = seen[completion.rollout_id]
        seen[completion.rollout_id] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(completion)
    return rounds


def _lock_rollouts(
    connection: Connection, completions: Sequence[Completion], configs: Mapping[UUID, RunConfig]
) -> Sequence[Any]:
    ids = {completion.rollout_id for completion in completions}
    oversampled = [run_id for run_id, config in configs.items() if config.oversample]
    if oversampled:
        lock_with_siblings(connection, ids, oversampled)
    return connection.execute(_LOCK, {"ids": list(ids)}).all()


def _record(
    connection: Connection,
    completions: list[Completion],
    rows: Iterable[Any],
    configs: Mapping[UUID, RunConfig],
    report: OutcomeReport,
) -> None:
    found = {row.rollout_id: row for row in rows}
    keys = {
        "ids": [completion.rollout_id for completion in completions],
        "nos": [completion.attempt_no for completion in completions],
    }
    attempts = {
        rollout_id: AttemptState(state)
        for rollout_id, state in connection.execute(_ATTEMPT_STATES, keys)
    }
    policies = {run_id: RetryPolicy.of(config) for run_id, config in configs.items()}
    outcomes: list[AttemptOutcome] = []
    for completion in completions:
        row = found.get(completion.rollout_id)
        state = attempts.get(completion.rollout_id)
        if row is None or state is None or row.run_id != completion.run_id:
            report.unknown.append(completion)
        elif _is_recorded(state, completion):
            report.duplicate += 1
        else:
            outcomes.append(_decide(row, completion, policies[row.run_id]))
    if not outcomes:
        return
    ending = [outcome for outcome in outcomes if outcome.ends_rollout]
    groups = lock_groups(connection, [outcome.rollout.group_id for outcome in ending])
    outcomes = _without_surplus(outcomes, groups)
    for outcome in outcomes:
        _count(outcome, report)
    write_outcomes(connection, outcomes)
    if ending:
        _settle(connection, [o for o in outcomes if o.ends_rollout], configs, report)


def _is_recorded(state: AttemptState, completion: Completion) -> bool:
    error = completion.error
    lost = error is not None and error.error_class is ErrorClass.WORKER_LOST
    return state in _RECORDED or (lost and state is AttemptState.LOST)


def _without_surplus(
    outcomes: list[AttemptOutcome], groups: Mapping[UUID, LockedGroup]
) -> list[AttemptOutcome]:
    """Turn successes that their group does not need into cancelled rollouts."""
    room = {group_id: group.room for group_id, group in groups.items()}
    kept: list[AttemptOutcome] = []
    for outcome in outcomes:
        if outcome.transition.rollout_state is RolloutState.SUCCEEDED:
            group_id = outcome.rollout.group_id
            if room[group_id] == 0:
                outcome = replace(outcome, transition=_SURPLUS)
            else:
                room[group_id] -= 1
        kept.append(outcome)
    return kept


def _settle(
    connection: Connection,
    ending: list[AttemptOutcome],
    configs: Mapping[UUID, RunConfig],
    report: OutcomeReport,
) -> None:
    """Update the groups and runs of rollouts that ended."""
    deltas: defaultdict[UUID, Counter[RolloutState]] = defaultdict(Counter)
    cut: Counter[UUID] = Counter()
    ended: defaultdict[UUID, Counter[str]] = defaultdict(Counter)
    for outcome in ending:
        state, rollout = outcome.transition.rollout_state, outcome.rollout
        assert state is not None
        deltas[rollout.group_id][state] += 1
        if state is RolloutState.CANCELLED:
            cut[rollout.group_id] += 1
        else:
            ended[rollout.run_id][str(state)] += 1
    touched = add_to_counters(connection, deltas, cut=cut)
    oversamples = any(config.oversample for config in configs.values())
    cuts = cut_satisfied(connection, touched) if oversamples else CutReport()
    short = find_short_groups(connection, touched, configs) if report.failed else []
    states = lock_judged_runs(connection, {group.run_id for group in short}, ended, configs)
    # A cancelled run gets no replacements, because no later step would cancel them.
    short = [group for group in short if states.get(group.run_id) is not RunState.CANCELLED]
    short = replace_failed(connection, short, configs)
    counted = {run_id: counts for run_id, counts in ended.items() if run_id in states}
    ready, dropped = close_groups(connection, touched)
    report.groups_ready += ready
    report.groups_dropped += dropped
    report.surplus += cuts.cut
    report.stopped += cuts.stopped
    report.paused += pause_short_runs(connection, short, configs)
    report.paused += pause_failing_runs(connection, counted, configs)


def _decide(row: Any, completion: Completion, policy: RetryPolicy) -> AttemptOutcome:
    rollout = Rollout(
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        run_id=row.run_id,
        state=RolloutState(row.state),
        attempt_no=row.attempt_no,
        attempts_used=row.attempts_used,
        lost_count=row.lost_count,
        died_count=row.died_count,
        unscored_no=row.unscored_no,
    )
    now: datetime = row.now
    try:
        transition = decide_after(
            rollout, completion, policy=policy, now=now, jitter=random.random()
        )
    except StaleCompletion:
        transition = Transition(AttemptState.SUPERSEDED, reason="stale")
    return AttemptOutcome(rollout, completion, transition)


def _count(outcome: AttemptOutcome, report: OutcomeReport) -> None:
    match outcome.transition.rollout_state:
        case RolloutState.SUCCEEDED:
            report.accepted += 1
        case RolloutState.QUEUED:
            report.retried += 1
        case RolloutState.FAILED:
            report.failed += 1
        case RolloutState.CANCELLED:
            report.surplus += 1
        case _:
            report.superseded += 1


def _configs(connection: Connection, run_ids: set[UUID]) -> Mapping[UUID, RunConfig]:
    rows = connection.execute(_CONFIGS, {"ids": list(run_ids)})
    return {row.run_id: RunConfig.stored(row.config) for row in rows}
