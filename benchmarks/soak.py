"""Whether memory stays flat: one long run, and what its processes held in each tenth of it.

Run by `python -m benchmarks soak`. A tenth's figure is the median of a sample a second. The first
tenth is warm-up; what counts is the last tenth over the second. Must not: print.
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
#: The last tenth may hold this much of what the second one held.
MOST_GROWTH = 1.10
_SAMPLE_S = 1.0
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Soak:
    """What a long run came to; memory is resident bytes, by process, in each tenth of the run."""

    workload: str
    rollouts: int
    finished: int
    wall_s: float
    memory: Mapping[str, Sequence[float]]

    def growth(self, process: str) -> float:
        """Return the last tenth over the second."""
        return self.memory[process][-1] / self.memory[process][1]

    @property
    def is_flat(self) -> bool:
        """Whether neither the controller nor a worker holds more at the end."""
        ours = [name for name in self.memory if name.startswith(("controller", "worker"))]
        return all(self.growth(name) <= MOST_GROWTH for name in ours)

    def to_json(self) -> dict[str, Any]:
        """Give the fields and what follows from them."""
        growth = {name: round(self.growth(name), 3) for name in self.memory}
        return {**asdict(self), "growth": growth, "is_flat": self.is_flat}


def measure_soak(workload: Workload) -> Soak:
    """Run the workload in groups of eight, as one run, and watch who holds how much meanwhile."""
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
    """Return each process's median in each tenth, by what was finished when it was sampled.

    Raises:
        ValueError: A tenth has no sample: the run was too short.
    """
    parts: list[list[Mapping[str, int]]] = [[] for _ in range(PARTS)]
    for finished, held in samples:
        parts[min(PARTS - 1, finished * PARTS // total)].append(held)
    if not all(parts):
        counts = [len(part) for part in parts]
        raise ValueError(f"samples by tenth are {counts}: take more rollouts")
    return {name: [median(held[name] for held in part) for part in parts] for name in parts[0][0]}
