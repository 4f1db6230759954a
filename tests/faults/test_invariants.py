"""Each invariant sees what it is for: a witness that overlooks a lie proves nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from benchmarks.faults.evidence import Evidence, Row
from benchmarks.faults.figures import count_figures
from benchmarks.faults.invariants import find_early_calls, find_violations
from benchmarks.faults.plugin import expected_reward

START = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = [f"math-g000000-r{index}" for index in range(2)]
MEAN = sum(map(expected_reward, NAMES)) / 2


def event(seq: int, entity: str, key: str, before: str, after: str, attempt: int = 1) -> Row:
    return {
        "seq": seq,
        "at": START + timedelta(seconds=seq),
        "entity": entity,
        "entity_id": key,
        "attempt_no": attempt,
        "from_state": before,
        "to_state": after,
    }


def rollout(index: int) -> Row:
    return {
        "rollout_id": f"r{index}",
        "group_id": "g0",
        "group_no": 0,
        "rollout_index": index,
        "name": NAMES[index],
        "state": "succeeded",
        "attempt_no": 1,
        "attempts_used": 1,
        "died_count": 0,
        "winner_attempt_no": 1,
        "reward": expected_reward(NAMES[index]),
        "error_class": None,
        "finished_at": START + timedelta(seconds=3 * index + 2),
    }


def attempt(index: int) -> Row:
    return {
        "rollout_id": f"r{index}",
        "attempt_no": 1,
        "state": "succeeded",
        "prompt_tokens": 10,
        "completion_tokens": 5,
    }


def good_evidence() -> Evidence:
    """One group of two, consumed; everything as it should be."""
    moves = [("queued", "dispatched"), ("dispatched", "running"), ("running", "succeeded")]
    events = [
        event(3 * index + number, "rollout", f"r{index}", *move)
        for index in range(2)
        for number, move in enumerate(moves)
    ]
    path = [("open", "ready"), ("ready", "leased"), ("leased", "consumed")]
    events += [event(10 + number, "group", "g0", *move) for number, move in enumerate(path)]
    deviation = abs(expected_reward(NAMES[0]) - expected_reward(NAMES[1])) / 2
    return Evidence(
        slug="math",
        groups_asked=1,
        group_size=2,
        max_attempts=3,
        max_lost=3,
        max_in_flight=1,
        rollouts=[rollout(0), rollout(1)],
        attempts=[attempt(0), attempt(1)],
        groups=[
            {
                "group_id": "g0",
                "group_no": 0,
                "state": "consumed",
                "drop_reason": None,
                "n_succeeded": 2,
                "n_failed": 0,
                "n_cancelled": 0,
                "reward_mean": MEAN,
                "reward_std": deviation,
            }
        ],
        events=events,
        batches=[{"group_id": "g0", "state": "committed", "consumer": "t", "trainer_step": 0}],
        trajectories=[
            {
                "name": name,
                "stored_digest": f"d{index}",
                "read_digest": f"d{index}",
                "rewarded": float(index + 7),
                "written_by": index + 7,
                "unreadable": None,
            }
            for index, name in enumerate(NAMES)
        ],
        executions=[
            {"at": float(index), "event": kind, "label": f"{name}-a1"}
            for index, name in enumerate(NAMES)
            for kind in ("start", "end")
        ],
        calls=[{"at": 0.0, "rollout": name, "status": 200, "tokens": 15} for name in NAMES],
        changes=[],
        started_at=START.timestamp(),
    )


def change(rows: str, number: int, **values: object) -> Callable[[Evidence], None]:
    def spoil(evidence: Evidence) -> None:
        getattr(evidence, rows)[number].update(values)

    return spoil


def drop(rows: str, number: int) -> Callable[[Evidence], None]:
    def spoil(evidence: Evidence) -> None:
        del getattr(evidence, rows)[number]

    return spoil


def add(rows: str, row: object) -> Callable[[Evidence], None]:
    def spoil(evidence: Evidence) -> None:
        getattr(evidence, rows).append(row)

    return spoil


def repeat(rows: str, number: int) -> Callable[[Evidence], None]:
    def spoil(evidence: Evidence) -> None:
        found = getattr(evidence, rows)
        found.append(copy.deepcopy(found[number]))

    return spoil


def test_a_history_without_faults_has_no_violations():
    assert find_violations(good_evidence()) == []


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        ("I1", drop("rollouts", 1)),
        ("I1", change("rollouts", 1, state="running")),
        ("I1", change("rollouts", 1, name="math-g000007-r0")),
        ("I2", repeat("events", 2)),
        ("I2", repeat("attempts", 0)),
        ("I2", drop("executions", 1)),
        ("I2", change("rollouts", 0, reward=0.123)),
        ("I2", change("attempts", 0, state="lost")),
        ("I3", change("groups", 0, n_succeeded=1)),
        ("I3", change("groups", 0, reward_mean=0.0)),
        ("I3", change("groups", 0, reward_std=0.9)),
        ("I4", repeat("batches", 0)),
        ("I4", change("batches", 0, state="leased")),
        ("I4", add("events", event(20, "group", "g0", "leased", "consumed"))),
        ("I5", change("rollouts", 0, attempts_used=4)),
        ("I5", change("rollouts", 0, died_count=4)),
        ("I5", change("rollouts", 0, attempt_no=2)),
        ("I7", change("events", 2, to_state="running")),
        ("I8", change("events", 1, from_state="queued")),
        ("I8", change("events", 1, to_state="queued")),
        ("I8", drop("events", 2)),
        ("I9", add("changes", "a trajectory was A and is B")),
        ("I10", drop("groups", 0)),
        ("I10", change("groups", 0, drop_reason="failed")),
        ("I11", change("rollouts", 0, state="failed")),
        ("I12", drop("trajectories", 0)),
        ("I12", change("trajectories", 0, unreadable="gone")),
        ("I12", change("trajectories", 0, stored_digest="d1")),
        ("I12", change("trajectories", 0, written_by=8)),
        ("I12", change("trajectories", 0, rewarded=None, written_by=None)),
    ],
)
def test_every_lie_is_seen(number: str, spoil: Callable[[Evidence], None]):
    evidence = good_evidence()
    spoil(evidence)
    assert number in {violation.partition(":")[0] for violation in find_violations(evidence)}


def test_calls_that_are_ahead_of_the_limit_are_seen():
    evenly = [number / 10 for number in range(100)]
    assert list(find_early_calls(evenly, since=0.0, limit_per_s=10, burst=1)) == []
    # A busy machine: nothing for two seconds, then all that was granted meanwhile.
    crowded = [max(at, 2.0) for at in evenly]
    assert list(find_early_calls(crowded, since=0.0, limit_per_s=10, burst=1)) == []
    early = [at * 0.9 for at in evenly]
    assert list(find_early_calls(early, since=0.0, limit_per_s=10, burst=1)) != []


def test_figures_count_what_was_done_again_and_how_long_it_took():
    evidence = good_evidence()
    evidence.executions.append({"at": 0.5, "event": "start", "label": f"{NAMES[0]}-a2"})
    evidence.calls.append({"at": 0.5, "rollout": NAMES[0], "status": 200, "tokens": 15})
    evidence.rollouts[0]["winner_attempt_no"] = 2
    evidence.faults.append((START.timestamp() + 0.5, "C1"))
    figures = count_figures(evidence)
    assert (figures.rollouts, figures.lost, figures.accepted_twice) == (2, 0, 0)
    assert (figures.executions, figures.repeated) == (3, 1)
    assert figures.tokens_wasted == 15
    assert figures.wall_s == pytest.approx(5.0)
    assert figures.recoveries_s == [pytest.approx(1.5)]
    assert figures.faults == {"C1": 1}
    assert (figures + figures).executions == 6
