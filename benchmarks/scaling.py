"""More worker and collector processes on one machine: throughput, and CPU time by part.

`python -m benchmarks scaling` runs it. The workload is W0, whose model answers at once, so that
only the CPU limits the throughput. Must not: print.
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

#: (worker processes, collectors); the total of attempts in flight is 500.
DEPLOYMENTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
IN_FLIGHT = 500
SCALING_ROLLOUTS = 3_000
#: From this load on the machine's cores count as the limit.
_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Deployment:
    """The results of one number of worker and collector processes."""

    workers: int
    collectors: int
    finished: int
    rollouts: int
    rollouts_per_s: float
    cpu_ms: dict[str, float]  #: per rollout, by part
    cores_used: float  #: by all parts, including the mock
    busiest: tuple[str, float]  #: the process with the most CPU time, and its number of cores
    connections: dict[str, int]  #: to Postgres and to the broker

    @property
    def limit(self) -> str:
        """The limit that was reached: all cores, or the one core of a Python process."""
        cores = len(os.sched_getaffinity(0))
        if self.cores_used >= _BUSY * cores:
            return f"all {cores} cores"
        name, share = self.busiest
        return f"one core of {name}" if share >= _BUSY else "no processor"

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the figures computed from them."""
        return {**asdict(self), "limit": self.limit}


def measure_scaling(*, rollouts: int = SCALING_ROLLOUTS) -> list[Deployment]:
    """Measure W0 with each number of processes."""
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
    """Return a Markdown table with a row per deployment and the CPU time by part."""
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
        # worker-0, worker-1 … count as one part.
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
