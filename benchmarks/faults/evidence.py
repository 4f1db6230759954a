"""What is known about a run when all is quiet: the store's rows and the actors' histories.

Loaded once, judged by `invariants` and counted by `figures`, which touch nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from benchmarks.faults import plugin
from benchmarks.faults.histories import read_history, rollout_of
from benchmarks.mock_llm import ACTOR as MODEL

if TYPE_CHECKING:
    from benchmarks.faults.deployment import Deployment
    from benchmarks.faults.observer import StoreObserver
    from benchmarks.faults.runs import FaultRun

Row = dict[str, Any]


@dataclass(slots=True)
class Evidence:
    """Rows are plain dictionaries; rollouts carry their `name`, attempts and events too."""

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
    executions: list[Row]  #: the workers' history: start, end and broken attempts
    calls: list[Row]  #: the model's history
    changes: list[str]  #: what the observer saw change that may not
    faults: list[tuple[float, str]] = field(default_factory=list)
    started_at: float = 0.0

    @property
    def names_asked(self) -> set[str]:
        """The names of all rollouts that were asked for."""
        return {
            f"{self.slug}-g{group:06d}-r{index}"
            for group in range(self.groups_asked)
            for index in range(self.group_size)
        }

    def events_by_entity(self, entity: str) -> dict[Any, list[Row]]:
        """Return the events of groups or rollouts, each entity's in order."""
        found: dict[Any, list[Row]] = defaultdict(list)
        for event in self.events:
            if event["entity"] == entity:
                found[event["entity_id"]].append(event)
        return found

    def starts(self) -> dict[str, int]:
        """Return how often each rollout was really begun."""
        found: dict[str, int] = defaultdict(int)
        for line in self.executions:
            if line["event"] == "start":
                found[rollout_of(line["label"])] += 1
        return found


_ROLLOUTS = """
SELECT *, :slug || '-g' || lpad(group_no::text, 6, '0') || '-r' || rollout_index AS name
FROM rollouts WHERE run_id = :run_id ORDER BY group_no, rollout_index
"""
_ATTEMPTS = "SELECT * FROM attempts WHERE run_id = :run_id ORDER BY rollout_id, attempt_no"
_GROUPS = "SELECT * FROM groups WHERE run_id = :run_id ORDER BY group_no"
_EVENTS = "SELECT * FROM events WHERE run_id = :run_id ORDER BY seq"
_BATCHES = """
SELECT b.consumer, b.trainer_step, b.state, m.group_id
FROM train_batches b JOIN train_batch_groups m USING (batch_id) WHERE b.run_id = :run_id
"""


def collect(deployment: Deployment, run: FaultRun, observer: StoreObserver) -> Evidence:
    """Read everything about a run."""
    with deployment.engine.connect() as connection:

        def rows(query: str) -> list[Row]:
            values = {"run_id": run.run_id, "slug": run.slug}
            return [dict(row) for row in connection.execute(text(query), values).mappings()]

        stored = [rows(query) for query in (_ROLLOUTS, _ATTEMPTS, _GROUPS, _EVENTS, _BATCHES)]
    rollouts, attempts, groups, events, batches = stored
    mark = f"{run.slug}-g"
    return Evidence(
        slug=run.slug,
        groups_asked=run.groups,
        group_size=run.config.n,
        max_attempts=run.config.max_attempts,
        max_lost=run.config.max_lost,
        max_in_flight=deployment.size.max_in_flight,
        rollouts=rollouts,
        attempts=attempts,
        groups=groups,
        events=events,
        batches=batches,
        executions=_of_run(read_history(deployment.histories, plugin.ACTOR), "label", mark),
        calls=_of_run(read_history(deployment.histories, MODEL), "rollout", mark),
        changes=list(observer.changes),
        faults=list(run.faults),
        started_at=run.started_at,
    )


def _of_run(lines: Sequence[Row], key: str, mark: str) -> list[Row]:
    return [line for line in lines if (line.get(key) or "").startswith(mark)]
