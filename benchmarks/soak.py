"""Memory over a long run: the resident memory of its processes in each tenth of the run.

`python -m benchmarks soak` runs it. A tenth's figure is the median of one sample per second. The
first tenth is warm-up; the result is the ratio of the last tenth to the second. Must not: print.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.mock_server import MockServer
from benchmarks.pipeline_subject import PipelineSubject
from benchmarks.workloads import Workload

PARTS = 10
#: Highest ratio of the last tenth to the second.
MOST_GROWTH = 1.10
_SAMPLE_S = 1.0
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Soak:
    """The result of a long run; memory is resident bytes by process in each tenth of the run."""

    workload: str
    rollouts: int
    finished: int
    wall_s: float
    memory: Mapping[str, Sequence[float]]

    def growth(self, process: str) -> float:
        """Return the ratio of the last tenth to the second."""
        return self.memory[process][-1] / self.memory[process][1]

    @property
    def is_flat(self) -> bool:
        """Whether the memory of the controller and of all workers stayed flat."""
        ours = [name for name in self.memory if name.startswith(("controller", "worker"))]
        return all(self.growth(name) <= MOST_GROWTH for name in ours)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the figures computed from them."""
        growth = {name: round(self.growth(name), 3) for name in self.memory}
        return {**asdict(self), "growth": growth, "is_flat": self.is_flat}


def measure_soak(workload: Workload) -> Soak:
    """Run the workload in groups of eight, as one run, and sample the memory meanwhile."""
    samples: list[tuple[int, Mapping[str, int]]] = []
    stop = threading.Event()
    with (
        MockServer() as mock,
        PipelineSubject() as subject,
    ):

        def watch() -> None:
            while not stop.wait(_SAMPLE_S):
                samples.append((subject.finished() * _GROUP, subject.resident_bytes()))

        watcher = threading.Thread(target=watch)
        mock.reset(workload.behaviour)
        started = monotonic()
        try:
            rewarded = subject.run_once(workload, mock, meanwhile=watcher.start, group=_GROUP)
        finally:
            stop.set()
        wall_s = monotonic() - started
        watcher.join()
    return Soak(
        workload.name,
        workload.rollouts,
        rewarded * _GROUP,
        round(wall_s, 1),
        memory_by_part(samples, total=workload.rollouts),
    )


def memory_by_part(
    samples: Sequence[tuple[int, Mapping[str, int]]], *, total: int
) -> dict[str, list[float]]:
    """Return each process's median in each tenth; finished rollouts assign a sample to its tenth.

    Raises:
        ValueError: A tenth has no sample, because the run was too short.
    """
    parts: list[list[Mapping[str, int]]] = [[] for _ in range(PARTS)]
    for finished, held in samples:
        parts[min(PARTS - 1, finished * PARTS // total)].append(held)
    if not all(parts):
        counts = [len(part) for part in parts]
        raise ValueError(f"samples by tenth are {counts}: take more rollouts")
    return {name: [median(held[name] for held in part) for part in parts] for name in parts[0][0]}
