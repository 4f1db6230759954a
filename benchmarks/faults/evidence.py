"""The evidence about a run after its end: the store's rows and the processes' histories.

`FaultRun` reads it once, `invariants` checks it and `figures` counts it. Must not: read anything.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.histories import rollout_of

Row = dict[str, Any]


@dataclass(slots=True)
class Evidence:
    """Rows as dictionaries; those of rollouts, attempts and events include the rollout's `name`."""

    slug: str
    groups_asked: int
    group_size: int
    max_attempts: int
    max_lost: int
    max_in_flight: int
    rollouts: list[Row]
    attempts: list[Row]
    groups: list[Row]
    events: list[Row]  #: in order of their sequence
    batches: list[Row]  #: one per group of a train batch
    trajectories: list[Row]  #: of succeeded rollouts, see `read_trajectories`
    executions: list[Row]  #: the workers' history: start, end and broken attempts
    calls: list[Row]  #: the model's history
    changes: list[str]  #: forbidden changes that the observer saw
    faults: list[tuple[float, str]] = field(default_factory=list)
    started_at: float = 0.0

    @property
    def names_asked(self) -> set[str]:
        """The names of all requested rollouts."""
        return {
            f"{self.slug}-g{group:06d}-r{index}"
            for group in range(self.groups_asked)
            for index in range(self.group_size)
        }

    def events_by_entity(self, entity: str) -> dict[Any, list[Row]]:
        """Return the events of groups or rollouts by entity, in order."""
        found: dict[Any, list[Row]] = defaultdict(list)
        for event in self.events:
            if event["entity"] == entity:
                found[event["entity_id"]].append(event)
        return found

    def starts(self) -> dict[str, int]:
        """Return the number of executions that workers began, by rollout."""
        found: dict[str, int] = defaultdict(int)
        for line in self.executions:
            if line["event"] == "start":
                found[rollout_of(line["label"])] += 1
        return found
