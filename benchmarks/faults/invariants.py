"""The invariants I1-I12, each a function from evidence to its violations.

The functions are pure, so that tests can show that each detects its violations. Must not: read a
store or a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean, pstdev
from types import MappingProxyType

from benchmarks.faults.evidence import Evidence, Row
from benchmarks.faults.plugin import expected_reward
from pipeline.contract.errors import IllegalTransition
from pipeline.contract.rollout import (
    TERMINAL_ROLLOUT_STATES,
    GroupState,
    RolloutState,
    require_transition,
)

_TERMINAL = {str(state) for state in TERMINAL_ROLLOUT_STATES}
_IN_FLIGHT = {"dispatched", "running"}

Invariant = Callable[[Evidence], Iterator[str]]


def find_violations(evidence: Evidence) -> list[str]:
    """Return all violations, each with the invariant's number."""
    return [
        f"{number}: {violation}"
        for number, invariant in INVARIANTS.items()
        for violation in invariant(evidence)
    ]


def find_early_calls(
    times: list[float], *, since: float, limit_per_s: float, burst: int
) -> Iterator[str]:
    """I6: yield the calls that came before limit and burst allow that many.

    On a busy machine a call comes later than its grant. So more calls than the limit may come
    within a second. But the total since the beginning must never exceed the limit.
    """
    for count, at in enumerate(sorted(times), start=1):
        most = burst + limit_per_s * (at - since)
        if count > most + 1:
            yield f"I6: {count} calls within {at - since:.3f} s, allowed are {most:.1f}"


def every_rollout_ends(evidence: Evidence) -> Iterator[str]:
    """I1: every requested rollout is in the store, and terminal."""
    stored = {row["name"]: row["state"] for row in evidence.rollouts}
    for name in sorted(evidence.names_asked - stored.keys()):
        yield f"{name} is not in the store"
    for name in sorted(stored.keys() - evidence.names_asked):
        yield f"{name} was never asked for"
    for name, state in stored.items():
        if state not in _TERMINAL:
            yield f"{name} is {state}"


def one_outcome_is_accepted(evidence: Evidence) -> Iterator[str]:
    """I2: a rollout ends once, by an attempt that a worker finished, with its reward."""
    ended = Counter(
        event["entity_id"]
        for event in evidence.events
        if event["entity"] == "rollout" and event["to_state"] in _TERMINAL
    )
    won = Counter(row["rollout_id"] for row in evidence.attempts if row["state"] == "succeeded")
    finished = {line["label"] for line in evidence.executions if line["event"] == "end"}
    for row in evidence.rollouts:
        name, key = row["name"], row["rollout_id"]
        if ended[key] > 1:
            yield f"{name} ended {ended[key]} times"
        if won[key] != (row["state"] == "succeeded"):
            yield f"{name} is {row['state']} with {won[key]} succeeded attempts"
        if row["state"] != "succeeded":
            continue
        if f"{name}-a{row['winner_attempt_no']}" not in finished:
            yield f"{name} was won by attempt {row['winner_attempt_no']}, which no worker finished"
        if row["reward"] != expected_reward(name):
            yield f"{name} has the reward {row['reward']}, not {expected_reward(name)}"


def counters_equal_rows(evidence: Evidence) -> Iterator[str]:
    """I3: a group's counters and statistics agree with its rows."""
    members: dict[object, list[Row]] = {}
    for row in evidence.rollouts:
        members.setdefault(row["group_id"], []).append(row)
    for group in evidence.groups:
        rows = members.get(group["group_id"], [])
        states = Counter(row["state"] for row in rows)
        for state in ("succeeded", "failed", "cancelled"):
            if group[f"n_{state}"] != states[state]:
                counted = group[f"n_{state}"]
                yield f"group {group['group_no']} counts {counted} {state}, has {states[state]}"
        rewards = [row["reward"] for row in rows if row["state"] == "succeeded"]
        if group["state"] in ("ready", "leased", "consumed") and rewards:
            yield from _wrong_statistics(group, rewards)


def groups_are_consumed_once(evidence: Evidence) -> Iterator[str]:
    """I4: a consumed group is in one committed batch, and no other group is in any."""
    committed = Counter(b["group_id"] for b in evidence.batches if b["state"] == "committed")
    for group in evidence.groups:
        count = committed[group["group_id"]]
        if count != (group["state"] == "consumed"):
            yield f"group {group['group_no']} is {group['state']} and was committed {count} times"
    for key, events in evidence.events_by_entity("group").items():
        if sum(event["to_state"] == "consumed" for event in events) > 1:
            yield f"group {key} was consumed more than once"


def attempts_stay_in_budget(evidence: Evidence) -> Iterator[str]:
    """I5: no budget is exceeded, and attempt numbers are given once, in order."""
    numbers: dict[object, list[int]] = {}
    for attempt in evidence.attempts:
        numbers.setdefault(attempt["rollout_id"], []).append(attempt["attempt_no"])
    for row in evidence.rollouts:
        if row["attempts_used"] > evidence.max_attempts:
            yield f"{row['name']} used {row['attempts_used']} attempts"
        if row["died_count"] > evidence.max_lost:
            yield f"{row['name']} died {row['died_count']} times"
        given = sorted(numbers.get(row["rollout_id"], []))
        if given != list(range(1, row["attempt_no"] + 1)):
            yield f"{row['name']} is at attempt {row['attempt_no']}, stored are {given}"


def in_flight_stays_below_cap(evidence: Evidence) -> Iterator[str]:
    """I7: the number of rollouts in flight never exceeded the cap."""
    out: set[object] = set()
    most = 0
    for event in evidence.events:
        if event["entity"] == "rollout":
            change = out.add if event["to_state"] in _IN_FLIGHT else out.discard
            change(event["entity_id"])
            most = max(most, len(out))
    if most > evidence.max_in_flight:
        yield f"{most} rollouts were in flight, allowed are {evidence.max_in_flight}"


def transitions_are_in_the_table(evidence: Evidence) -> Iterator[str]:
    """I8: each event begins in the state where the one before ended, by an allowed transition."""
    for entity, states, first, stored in (
        ("rollout", RolloutState, "queued", evidence.rollouts),
        ("group", GroupState, "open", evidence.groups),
    ):
        rows = {row[f"{entity}_id"]: row["state"] for row in stored}
        for key, events in evidence.events_by_entity(entity).items():
            state = first
            for event in events:
                before, after = event["from_state"], event["to_state"]
                if before is None:
                    continue  # its creation
                if before != state:
                    yield f"{entity} {key} was {state}, its next event says {before}"
                try:
                    require_transition(states(before), states(after))
                except IllegalTransition as error:
                    yield f"{entity} {key}: {error}"
                state = after
            if rows.get(key) != state:
                yield f"{entity} {key} is {rows.get(key)}, its events end with {state}"


def stored_outcomes_never_change(evidence: Evidence) -> Iterator[str]:
    """I9: an accepted outcome never changes."""
    yield from evidence.changes


def groups_add_up(evidence: Evidence) -> Iterator[str]:
    """I10: enqueued = consumed + buffered + running + dropped, and drops have a reason."""
    states = Counter(group["state"] for group in evidence.groups)
    total = sum(states[state] for state in ("consumed", "ready", "leased", "open", "dropped"))
    if total != evidence.groups_asked:
        yield f"{evidence.groups_asked} groups were enqueued, found are {dict(states)}"
    for group in evidence.groups:
        if (group["state"] == "dropped") != (group["drop_reason"] is not None):
            yield f"group {group['group_no']} is {group['state']}, why: {group['drop_reason']}"


def failures_have_no_reward(evidence: Evidence) -> Iterator[str]:
    """I11: a failed rollout has no reward, and has an error class."""
    for row in evidence.rollouts:
        if row["state"] != "succeeded" and row["reward"] is not None:
            yield f"{row['name']} is {row['state']} with the reward {row['reward']}"
        if row["state"] == "failed" and row["error_class"] is None:
            yield f"{row['name']} failed without an error class"


def trajectories_belong_to_rewards(evidence: Evidence) -> Iterator[str]:
    """I12: a stored trajectory is of the execution whose reward was accepted."""
    stored = {row["name"]: row for row in evidence.trajectories}
    for rollout in evidence.rollouts:
        if rollout["state"] != "succeeded":
            continue
        row = stored.get(rollout["name"])
        if row is None or row["unreadable"] is not None:
            yield f"{rollout['name']} has no trajectory: {row and row['unreadable']}"
        elif row["stored_digest"] != row["read_digest"]:
            yield f"{row['name']} has the digest {row['stored_digest']}, not {row['read_digest']}"
        elif row["rewarded"] is None or row["rewarded"] != row["written_by"]:
            yield (
                f"{row['name']} has the reward of execution {row['rewarded']} and the trajectory "
                f"of {row['written_by']}"
            )


def count_repeated(evidence: Evidence) -> Mapping[str, int]:
    """Return the number of repeated executions of each rollout."""
    return {name: count - 1 for name, count in evidence.starts().items() if count > 1}


def _wrong_statistics(group: Row, rewards: list[float]) -> Iterator[str]:
    for name, value in (("reward_mean", fmean(rewards)), ("reward_std", pstdev(rewards))):
        if abs((group[name] or 0.0) - value) > 1e-9:
            yield f"group {group['group_no']} has the {name} {group[name]}, its rows {value}"


INVARIANTS: Mapping[str, Invariant] = MappingProxyType(
    {
        "I1": every_rollout_ends,
        "I2": one_outcome_is_accepted,
        "I3": counters_equal_rows,
        "I4": groups_are_consumed_once,
        "I5": attempts_stay_in_budget,
        "I7": in_flight_stays_below_cap,
        "I8": transitions_are_in_the_table,
        "I9": stored_outcomes_never_change,
        "I10": groups_add_up,
        "I11": failures_have_no_reward,
        "I12": trajectories_belong_to_rewards,
    }
)

__all__ = ["INVARIANTS", "count_repeated", "find_early_calls", "find_violations"]
