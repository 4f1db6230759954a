"""Measurements on a noisy machine: two subjects run alternately, A B A B, compared pair by pair.

The bench commands run it. Each ratio is of one pair, whose halves ran one after the other. The
result is the median over pairs. Must not: print or judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.mock_server import MockServer
from benchmarks.subjects import Measurement, Subject
from benchmarks.workloads import Workload

METRICS: dict[str, Callable[[Measurement], float]] = {
    "cpu": lambda measured: measured.cpu_s / measured.rollouts,
    "wall": lambda measured: measured.wall_s,
    "rate": lambda measured: measured.rollouts_per_s,
    "rss": lambda measured: float(measured.peak_rss_bytes),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measurements of a subject and of its baseline, in pairs."""

    pairs: Sequence[tuple[Measurement, Measurement]]
    """(baseline, subject), in the order they ran."""

    @property
    def workload(self) -> str:
        """The workload of both."""
        return self.pairs[0][0].workload

    @property
    def baseline(self) -> str:
        """The name of the baseline."""
        return self.pairs[0][0].subject

    @property
    def subject(self) -> str:
        """The name of the subject."""
        return self.pairs[0][1].subject

    def ratios(self, metric: str) -> list[float]:
        """Subject over baseline, pair by pair; `metric` is a key of `METRICS`."""
        value = METRICS[metric]
        return [value(subject) / value(baseline) for baseline, subject in self.pairs]

    def ratio(self, metric: str) -> float:
        """The median of the pairs' ratios."""
        return median(self.ratios(metric))

    def medians(self, value: Callable[[Measurement], float]) -> tuple[float, float]:
        """The median of a value for the baseline and for the subject."""
        return (
            median(value(baseline) for baseline, _ in self.pairs),
            median(value(subject) for _, subject in self.pairs),
        )

    def to_json(self) -> dict[str, Any]:
        """All runs and all ratios."""
        return {
            "workload": self.workload,
            "baseline": self.baseline,
            "subject": self.subject,
            "ratios": {
                name: {
                    "median": round(self.ratio(name), 3),
                    "pairs": [round(ratio, 3) for ratio in self.ratios(name)],
                }
                for name in METRICS
            },
            "runs": [measured.to_json() for pair in self.pairs for measured in pair],
        }


def compare(
    baseline: Subject, subject: Subject, workload: Workload, mock: MockServer, *, pairs: int
) -> Comparison:
    """Run baseline and subject in turn, `pairs` times each."""
    if pairs < 1:
        raise ValueError(f"pairs is {pairs}: at least one is needed")
    return Comparison(
        [(baseline.measure(workload, mock), subject.measure(workload, mock)) for _ in range(pairs)]
    )
