"""The trial of resumed rollouts: workers are killed, and the model server counts its calls.

`python -m benchmarks resume` and the fault tests run it. A rollout makes a fixed number of calls,
so each call beyond that number was caused by a killed worker. Must not: count with the pipeline's
own figures.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from sqlalchemy import text

from benchmarks.faults.deployment import SHORT_LEASE, Deployment, Size
from benchmarks.faults.invariants import find_violations
from benchmarks.faults.runs import FaultRun
from benchmarks.mock_behaviour import MockBehaviour
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.claim_checks import load_body

_POLL_S = 0.05
_ROW = re.compile(r"\[row \d+\]")

_BODIES = text("""
SELECT t.body, t.body_uri, t.body_digest, t.codec FROM rollouts r JOIN trajectories t
    ON t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no
WHERE r.run_id = :run_id
""")


@dataclass(frozen=True, slots=True)
class ResumeFigures:
    """The cost of killed workers."""

    rollouts: int
    turns: int
    kills: int
    lost_attempts: int  #: that were executed, and whose worker was killed
    calls: int  #: that the model server got
    replayed: int
    saved_tokens: int
    unequal: int  #: trajectories that differ from one without a killed worker
    wall_s: float
    violations: tuple[str, ...]

    @property
    def calls_per_loss(self) -> float:
        """Calls beyond the necessary ones, for each lost attempt."""
        beyond = self.calls - self.rollouts * self.turns
        return beyond / self.lost_attempts if self.lost_attempts else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        return asdict(self) | {"calls_per_loss": self.calls_per_loss}


def trial_size(
    *, in_flight: int, workers: int, turns: int, latency_ms: float, after_s: float
) -> Size:
    """Return a deployment whose rollouts make `turns` calls that never fail."""
    return Size(
        workers=workers,
        concurrency=-(-in_flight // workers),
        max_in_flight=in_flight,
        lease=SHORT_LEASE,
        model=MockBehaviour(latency_ms=latency_ms, sigma=0.3, turns=turns),
        model_timeout_s=60.0,
        journal_after_s=after_s,
    )


def run_trial(
    deployment: Deployment,
    *,
    groups: int,
    kill_every_calls: int,
    most_kills: int | None = None,
    seed: int = 1,
    patience_s: float = 600.0,
    log: Callable[[str], None] = lambda _: None,
) -> ResumeFigures:
    """Run one calm group, and then groups whose workers are killed; compare the two.

    Args:
        deployment: One of `trial_size`.
        groups: Number of groups.
        kill_every_calls: Calls of the model server from one kill to the next.
        most_kills: Kills after which the run is left alone; None: it never is.
        seed: Decides which worker is killed.
        patience_s: Longest time for each of the two runs.
        log: Takes a line for each kill.

    Raises:
        TimeoutError: A run did not end; the message has its state.
    """
    turns = deployment.size.model.turns
    config = {"limits": {"max_steps": 10 * turns}, "max_attempts": 50, "max_lost": 50}
    calm = FaultRun(deployment, groups=1, name="calm", **config)
    calm.wait_terminal(timeout_s=patience_s)
    calm.evidence()
    reference = next(_conversations(deployment, calm))
    deployment.model.reset()
    random, kills = Random(seed), 0
    run = FaultRun(deployment, groups=groups, name="resumed", **config)
    until = time.monotonic() + patience_s
    while kills != most_kills and not run.is_done() and time.monotonic() < until:
        if _calls(deployment) < (kills + 1) * kill_every_calls or not deployment.workers:
            time.sleep(_POLL_S)
            continue
        random.choice(deployment.workers).process.kill()
        kills += 1
        log(f"  kill {kills}  {dict(run.states())}")
    run.wait_terminal(timeout_s=patience_s)
    evidence = run.evidence()
    started, ended = (
        {line["label"] for line in evidence.executions if (line["event"] == "start") is is_start}
        for is_start in (True, False)
    )
    return ResumeFigures(
        rollouts=run.rollouts,
        turns=turns,
        kills=kills,
        lost_attempts=len(started - ended),
        calls=_calls(deployment),
        replayed=sum(attempt["calls_replayed"] or 0 for attempt in evidence.attempts),
        saved_tokens=sum(attempt["tokens_saved"] or 0 for attempt in evidence.attempts),
        unequal=sum(each != reference for each in _conversations(deployment, run)),
        wall_s=max(row["finished_at"].timestamp() for row in evidence.rollouts) - run.started_at,
        violations=tuple(find_violations(evidence)),
    )


def _calls(deployment: Deployment) -> int:
    return deployment.model.stats()["calls"]


def _conversations(deployment: Deployment, run: FaultRun) -> Iterator[list[Any]]:
    """Yield the messages of each rollout, without the row in its prompt."""
    with deployment.engine.connect() as connection:
        rows = connection.execute(_BODIES, {"run_id": run.run_id}).all()
    payloads = deployment.payloads()
    for row in rows:
        body = row.body or load_body(row.body_uri, row.body_digest, payloads)
        messages = unpack_record(bytes(body), row.codec).messages
        yield [(m["role"], _ROW.sub("", str(m.get("content")))) for m in messages]
