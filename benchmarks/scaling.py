"""More worker and collector processes on one machine: throughput, and where the CPU goes.

Run by `python -m benchmarks scaling`. W0, whose model answers at once, so that nothing waits but
for a processor. Must not: print.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.mock_server import MockServer
from benchmarks.pipeline_subject import PipelineSubject
from benchmarks.report import table
from benchmarks.subjects import Measurement
from benchmarks.workloads import WORKLOADS

#: (worker processes, collectors); 500 attempts are in flight in all.
DEPLOYMENTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
IN_FLIGHT = 500
SCALING_ROLLOUTS = 3_000
#: A machine whose processors are busy for this share of the time has no more to give.
_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Deployment:
    """What one arrangement of processes came to."""

    workers: int
    collectors: int
    finished: int
    rollouts: int
    rollouts_per_s: float
    cpu_ms: dict[str, float]  #: per rollout, by part
    cores_used: float  #: by all parts, the mock included
    busiest: tuple[str, float]  #: the process that used most, and how many cores that was
    connections: dict[str, int]  #: to Postgres and to the broker

    @property
    def limit(self) -> str:
        """What ran out: all cores, or the one core that a Python process can use."""
        cores = len(os.sched_getaffinity(0))
        if self.cores_used >= _BUSY * cores:
            return f"all {cores} cores"
        name, share = self.busiest
        return f"one core of {name}" if share >= _BUSY else "no processor"

    def to_json(self) -> dict[str, Any]:
        """Give the fields and what follows from them."""
        return {**asdict(self), "limit": self.limit}


def measure_scaling(*, rollouts: int = SCALING_ROLLOUTS) -> list[Deployment]:
    """Measure W0 on each arrangement of processes."""
    load = WORKLOADS["W0"].resized(rollouts=rollouts)
    found: list[Deployment] = []
    with MockServer() as mock:
        for workers, collectors in DEPLOYMENTS:
            with PipelineSubject(
                workers=workers,
                concurrency=IN_FLIGHT // workers,
                client="lean",
                collectors=collectors,
            ) as subject:
                measured = subject.measure(load, mock)
                connections = subject.connections()
            found.append(_deployment(workers, collectors, measured, connections))
    return found


def scaling_table(found: Sequence[Deployment]) -> str:
    """A row per arrangement, CPU by part, as a Markdown table."""
    parts = list(dict.fromkeys(part for one in found for part in one.cpu_ms))
    heads = ["workers", "collectors", "rollouts/s", *(f"{part} ms" for part in parts), "cores used"]
    rows = [
        [
            str(one.workers),
            str(one.collectors),
            f"{one.rollouts_per_s:.0f}",
            *(f"{one.cpu_ms.get(part, 0.0):.2f}" for part in parts),
            f"{one.cores_used:.2f}",
            one.limit,
            " / ".join(str(n) for n in one.connections.values()),
        ]
        for one in found
    ]
    return table([*heads, "limit", "connections: Postgres / Redis"], rows)


def _deployment(
    workers: int, collectors: int, measured: Measurement, connections: dict[str, int]
) -> Deployment:
    cpu_ms: dict[str, float] = {}
    for name, usage in measured.usage.items():
        # worker-0, worker-1 … are one part.
        part = name.partition("-")[0]
        cpu_ms[part] = cpu_ms.get(part, 0.0) + 1000 * usage.cpu_s / measured.rollouts
    used = {name: usage.cpu_s / measured.wall_s for name, usage in measured.usage.items()}
    return Deployment(
        workers=workers,
        collectors=collectors,
        finished=measured.finished,
        rollouts=measured.rollouts,
        rollouts_per_s=measured.rollouts_per_s,
        cpu_ms=cpu_ms,
        cores_used=sum(used.values()),
        busiest=max(used.items(), key=lambda item: item[1]),
        connections=connections,
    )
