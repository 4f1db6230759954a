"""The figures of runs under faults: lost, accepted twice, repeated, wasted, recovered.

They are counted from evidence; the campaign prints them and the tests assert them. Must not: judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.faults.evidence import Evidence, Row
from benchmarks.faults.invariants import count_repeated

_TERMINAL = ("succeeded", "failed", "cancelled")


@dataclass(slots=True)
class Figures:
    """The reported figures; those of several runs can be added."""

    rollouts: int = 0
    lost: int = 0  #: requested rollouts without an outcome
    accepted_twice: int = 0
    failed: int = 0
    executions: int = 0
    repeated: int = 0  #: executions beyond the first of their rollout
    superseded: int = 0  #: attempts whose outcome came too late, or was no longer needed
    tokens: int = 0
    tokens_wasted: int = 0  #: tokens of answers that no accepted outcome used
    wall_s: float = 0.0  #: from the enqueue to the last outcome
    recoveries: list[tuple[str, float]] = field(default_factory=list)  #: fault, seconds
    faults: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Figures) -> Figures:
        names = [name for name in asdict(self)]
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def rollouts_per_s(self) -> float:
        """Throughput."""
        return self.rollouts / self.wall_s if self.wall_s else 0.0

    @property
    def recoveries_s(self) -> list[float]:
        """The times from a fault to the outcome of each rollout that lost an attempt by it."""
        return [seconds for _, seconds in self.recoveries]

    def recovery_s(self, share: float, fault: str | None = None) -> float | None:
        """Return this quantile of the recoveries, from all faults or from one."""
        times = sorted(seconds for name, seconds in self.recoveries if fault in (None, name))
        return times[min(len(times) - 1, int(share * len(times)))] if times else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the figures computed from them."""
        values = asdict(self) | {
            "faults": dict(self.faults),
            "recovery_p50_s": self.recovery_s(0.5),
            "recovery_p99_s": self.recovery_s(0.99),
            "rollouts_per_s": self.rollouts_per_s,
        }
        del values["recoveries"]
        return values


def count_figures(evidence: Evidence) -> Figures:
    """Count the figures in the evidence."""
    ended = [row for row in evidence.rollouts if row["state"] in _TERMINAL]
    events = evidence.events_by_entity("rollout").values()
    used = sum(
        (attempt["prompt_tokens"] or 0) + (attempt["completion_tokens"] or 0)
        for attempt in evidence.attempts
        if attempt["state"] == "succeeded"
    )
    tokens = sum(call["tokens"] for call in evidence.calls)
    last_s = max((row["finished_at"].timestamp() for row in ended), default=evidence.started_at)
    return Figures(
        rollouts=len(evidence.names_asked),
        lost=len(evidence.names_asked - {row["name"] for row in ended}),
        accepted_twice=sum(_times_ended(history) > 1 for history in events),
        failed=sum(row["state"] == "failed" for row in ended),
        executions=sum(evidence.starts().values()),
        repeated=sum(count_repeated(evidence).values()),
        superseded=sum(attempt["state"] == "superseded" for attempt in evidence.attempts),
        tokens=tokens,
        tokens_wasted=tokens - used,
        wall_s=last_s - evidence.started_at,
        recoveries=find_recoveries(evidence),
        faults=Counter(name for _, name in evidence.faults),
    )


def find_recoveries(evidence: Evidence) -> list[tuple[str, float]]:
    """Return the times from each fault to the outcome of every rollout that lost an attempt."""
    found: list[tuple[str, float]] = []
    histories = evidence.events_by_entity("rollout")
    won = {row["rollout_id"]: row["winner_attempt_no"] for row in evidence.rollouts}
    for at, name in evidence.faults:
        for key, events in histories.items():
            hit = _attempt_in_flight(events, at)
            ended = next((e for e in events if e["to_state"] in _TERMINAL), None)
            if hit is not None and ended is not None and hit != won[key]:
                found.append((name, ended["at"].timestamp() - at))
    return found


def _attempt_in_flight(events: Sequence[Row], at: float) -> int | None:
    attempt: int | None = None
    for event in events:
        if event["at"].timestamp() > at:
            break
        attempt = event["attempt_no"] if event["to_state"] in ("dispatched", "running") else None
    return attempt


def _times_ended(events: Sequence[Row]) -> int:
    return sum(event["to_state"] in _TERMINAL for event in events)
