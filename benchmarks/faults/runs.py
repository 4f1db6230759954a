"""One run under faults: enqueued, watched while it is harmed, judged when all is quiet.

Made by tests and the campaign on a deployment. Must not: harm anything itself.
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
from benchmarks.faults.evidence import Evidence, collect
from benchmarks.faults.histories import wall_clock
from benchmarks.faults.observer import StoreObserver
from benchmarks.mock_answers import FINAL_ANSWER
from benchmarks.workloads import QUESTION
from pipeline.contract.run import RunConfig
from pipeline.store.prompts import PromptSource
from producers.datasets import Prompt
from producers.enqueue import enqueue

GROUP_SIZE = 8
#: A broker that is lost again and again costs lost attempts, and poison is a matter of its own.
PATIENT = 20

_NUMBERS = itertools.count(1)


class FaultRun:
    """A run of groups of eight whose outcome is known beforehand.

    Args:
        deployment: Where it runs.
        groups: Prompts.
        name: Beginning of its slug.
        deeds: Prompt number → further fields, such as `deed`.
        gated: Whether rollouts, once they run, wait for `open_gate`.
        config: Over the defaults of the fault suite.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        groups: int,
        name: str = "run",
        deeds: dict[int, dict[str, Any]] | None = None,
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
            prompts=_prompts(groups, deeds or {}, {"gate": str(self._gate)} if gated else {}),
        )
        self.run_id = report.run.run_id
        self._observer.start()

    def open_gate(self) -> None:
        """Let the rollouts go on, those that run and those that will."""
        self._gate.touch()

    def note_fault(self, name: str) -> None:
        """Note that a fault begins now."""
        self.faults.append((wall_clock(), name))

    @property
    def rollouts(self) -> int:
        """How many rollouts were asked for."""
        return self.groups * self.config.n

    def states(self) -> Counter[str]:
        """Return the rollouts by state; nothing while the store is down."""
        query = "SELECT state, count(*) FROM rollouts WHERE run_id = :run_id GROUP BY state"
        return Counter({state: count for state, count in self.rows(query)})

    def count_lost(self) -> int:
        """Return how often an attempt was given up as lost."""
        query = "SELECT count(*) FROM events WHERE run_id = :run_id AND reason = 'worker_lost'"
        return sum(count for (count,) in self.rows(query))

    def rows(self, query: str, **values: Any) -> Sequence[Any]:
        """Run a query about this run; no rows while the store is down."""
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
        """Wait until so many rollouts are known to run."""
        self.deployment.wait_until(
            lambda: self.states()["running"] >= count or self.is_done(),
            what=f"{count} running rollouts of {self.slug}",
            timeout_s=timeout_s,
        )

    def wait_terminal(self, *, timeout_s: float = 60) -> None:
        """Wait until every rollout has ended.

        Raises:
            TimeoutError: Some have not; says in which states they are.
        """
        try:
            self.deployment.wait_until(self.is_done, what=self.slug, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.slug} is not done: {dict(self.states())}.\n{self._open_ends()}\n{error}"
            ) from None

    def evidence(self) -> Evidence:
        """Return what the store and the histories say, once all has ended."""
        self._observer.stop()
        return collect(self.deployment, self, self._observer)

    def is_done(self) -> bool:
        """Whether every rollout has ended."""
        return self._ended() == self.rollouts

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


def _defaults() -> dict[str, Any]:
    return {
        "agent": plugin.NAME,
        "tools": ("calculator",),
        "reward": plugin.NAME,
        "n": GROUP_SIZE,
        "max_attempts": 5,
        "max_lost": PATIENT,
        "backoff_base_s": 0.2,
        "backoff_max_s": 1.0,
    }


def _prompts(
    groups: int, deeds: dict[int, dict[str, Any]], all_have: dict[str, Any]
) -> list[Prompt]:
    return [
        Prompt(
            number,
            {
                "content": f"{QUESTION} [row {number}]",
                "answer": FINAL_ANSWER,
                **all_have,
                **deeds.get(number, {}),
            },
        )
        for number in range(groups)
    ]
