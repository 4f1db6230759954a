"""One run under faults: enqueue it, observe it, and collect the evidence after its end.

Tests and the campaign create it on a deployment. Must not: inject faults itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from benchmarks.faults import plugin
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.evidence import Evidence, Row
from benchmarks.faults.histories import read_history, wall_clock
from benchmarks.faults.observer import StoreObserver
from benchmarks.faults.trajectories import read_trajectories
from benchmarks.mock_answers import FINAL_ANSWER
from benchmarks.mock_llm import ACTOR as MODEL
from benchmarks.workloads import QUESTION
from pipeline.contract.run import RunConfig
from pipeline.store.prompts import PromptSource
from producers.datasets import Prompt
from producers.enqueue import enqueue

GROUP_SIZE = 8

_NUMBERS = itertools.count(1)

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


class FaultRun:
    """A run of groups of eight with predictable rewards.

    Args:
        deployment: The deployment.
        groups: Number of prompts.
        name: Prefix of its slug.
        harms: Prompt number → further fields of the prompt, such as `harm` (`plugin.py`).
        gated: Whether running rollouts wait for `open_gate`.
        config: Overrides of the fault suite's defaults.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        groups: int,
        name: str = "run",
        harms: dict[int, dict[str, Any]] | None = None,
        gated: bool = False,
        **config: Any,
    ) -> None:
        self.deployment = deployment
        self.slug = f"{name}{next(_NUMBERS)}"
        self.config = RunConfig(**{**_defaults(), **config})
        self.groups = groups
        self.faults: list[tuple[float, str]] = []
        self.started_at = wall_clock()
        self._gate = deployment.folder / f"gate-{self.slug}"
        self._observer = StoreObserver(deployment.engine, self.slug)
        report = enqueue(
            deployment.engine,
            run=self.slug,
            config=self.config,
            source=PromptSource("faults"),
            prompts=_prompts(groups, harms or {}, {"gate": str(self._gate)} if gated else {}),
        )
        self.run_id = report.run.run_id
        self._observer.start()

    def open_gate(self) -> None:
        """Let all rollouts continue."""
        self._gate.touch()

    def note_fault(self, name: str) -> None:
        """Record that a fault begins now."""
        self.faults.append((wall_clock(), name))

    @property
    def rollouts(self) -> int:
        """The number of requested rollouts."""
        return self.groups * self.config.n

    def states(self) -> Counter[str]:
        """Return the number of rollouts by state; empty while the store is down."""
        query = "SELECT state, count(*) FROM rollouts WHERE run_id = :run_id GROUP BY state"
        return Counter({state: count for state, count in self.rows(query)})

    def count_lost(self) -> int:
        """Return the number of attempts that were lost."""
        query = "SELECT count(*) FROM events WHERE run_id = :run_id AND reason = 'worker_lost'"
        return sum(count for (count,) in self.rows(query))

    def rows(self, query: str, **values: Any) -> Sequence[Any]:
        """Run a query about this run; returns no rows while the store is down."""
        try:
            with self.deployment.engine.connect() as connection:
                return connection.execute(text(query), {"run_id": self.run_id, **values}).all()
        except DBAPIError:
            return []

    def wait_done(self, share: float, *, timeout_s: float = 60) -> None:
        """Wait until this share of the rollouts has ended."""
        self.deployment.wait_until(
            lambda: self._ended() >= share * self.rollouts,
            what=f"{share:.0%} of {self.slug}: {self.states()}",
            timeout_s=timeout_s,
        )

    def wait_running(self, count: int, *, timeout_s: float = 60) -> None:
        """Wait until so many rollouts are in state `running`."""
        self.deployment.wait_until(
            lambda: self.states()["running"] >= count or self.is_done(),
            what=f"{count} running rollouts of {self.slug}",
            timeout_s=timeout_s,
        )

    def wait_terminal(self, *, timeout_s: float = 60) -> None:
        """Wait until every rollout has ended.

        Raises:
            TimeoutError: Some have not ended; the message has their states.
        """
        try:
            self.deployment.wait_until(self.is_done, what=self.slug, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.slug} is not done: {dict(self.states())}.\n{self._open_ends()}\n{error}"
            ) from None

    def wait_executions_end(self, *, timeout_s: float = 60) -> None:
        """Wait until every execution has ended, also second ones whose outcome is not needed.

        An execution that was killed never ends, so this is for runs without such faults.
        """
        self.wait_terminal(timeout_s=timeout_s)
        self.deployment.wait_until(
            lambda: not self._executing().total(),
            what=f"the end of {self._executing()}",
            timeout_s=timeout_s,
        )

    def evidence(self) -> Evidence:
        """Return the evidence from the store and the histories, after the end of all rollouts."""
        self._observer.stop()
        with self.deployment.engine.connect() as connection:

            def rows(query: str) -> list[Row]:
                values = {"run_id": self.run_id, "slug": self.slug}
                return [dict(row) for row in connection.execute(text(query), values).mappings()]

            stored = [rows(query) for query in (_ROLLOUTS, _ATTEMPTS, _GROUPS, _EVENTS, _BATCHES)]
        rollouts, attempts, groups, events, batches = stored
        mark = f"{self.slug}-g"
        executions = read_history(self.deployment.histories, plugin.ACTOR)
        calls = read_history(self.deployment.histories, MODEL)
        return Evidence(
            slug=self.slug,
            groups_asked=self.groups,
            group_size=self.config.n,
            max_attempts=self.config.max_attempts,
            max_lost=self.config.max_lost,
            max_in_flight=self.deployment.size.max_in_flight,
            rollouts=rollouts,
            attempts=attempts,
            groups=groups,
            events=events,
            batches=batches,
            trajectories=read_trajectories(
                self.deployment.engine, self.deployment.payloads(), self.run_id, self.slug
            ),
            executions=_of_run(executions, "label", mark),
            calls=_of_run(calls, "rollout", mark),
            changes=list(self._observer.changes),
            faults=list(self.faults),
            started_at=self.started_at,
        )

    def is_done(self) -> bool:
        """Whether every rollout has ended."""
        return self._ended() == self.rollouts

    def _executing(self) -> Counter[str]:
        lines = _of_run(
            read_history(self.deployment.histories, plugin.ACTOR), "label", f"{self.slug}-g"
        )
        begun = Counter(line["label"] for line in lines if line["event"] == "start")
        return begun - Counter(line["label"] for line in lines if line["event"] != "start")

    def _open_ends(self) -> str:
        query = """
            SELECT r.group_no, r.rollout_index, r.state, a.attempt_no, a.state, a.worker_id,
                   a.phase, a.step, now() - a.dispatched_at, now() - a.started_at,
                   a.lease_until - now()
            FROM rollouts r LEFT JOIN attempts a USING (rollout_id, attempt_no)
            WHERE r.run_id = :run_id AND r.state IN ('queued', 'dispatched', 'running')
            ORDER BY r.group_no, r.rollout_index LIMIT 30
        """
        return "\n".join(" ".join(map(str, row)) for row in self.rows(query))

    def _ended(self) -> int:
        states = self.states()
        return states["succeeded"] + states["failed"] + states["cancelled"]


def _of_run(lines: Sequence[Row], key: str, mark: str) -> list[Row]:
    return [line for line in lines if (line.get(key) or "").startswith(mark)]


def _defaults() -> dict[str, Any]:
    return {
        "agent": plugin.NAME,
        "tools": ("calculator",),
        "reward": plugin.NAME,
        "n": GROUP_SIZE,
        "max_attempts": 5,
        "backoff_base_s": 0.2,
        "backoff_max_s": 1.0,
    }


def _prompts(groups: int, harms: dict[int, dict[str, Any]], common: dict[str, Any]) -> list[Prompt]:
    return [
        Prompt(
            number,
            {
                "content": f"{QUESTION} [row {number}]",
                "answer": FINAL_ANSWER,
                **common,
                **harms.get(number, {}),
            },
        )
        for number in range(groups)
    ]
