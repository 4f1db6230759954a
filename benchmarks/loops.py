"""B1 and B2 against each other, and with the pipeline beside them over concurrency.

Run by `python -m benchmarks loops` and `... sweep`. Must not: judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.mock_server import MockServer
from benchmarks.pairs import Comparison, compare, sweep
from benchmarks.pipeline_subject import FreshPipeline
from benchmarks.plots import Chart, Series
from benchmarks.subjects import BareLoop, Measurement
from benchmarks.workloads import WORKLOADS


def compare_loops(
    names: Sequence[str], *, pairs: int, rollouts: int | None = None
) -> list[Comparison]:
    """B2 over B1 on each of the workloads."""
    with MockServer() as mock:
        return [
            compare(
                BareLoop("B1"),
                BareLoop("B2"),
                WORKLOADS[name].resized(rollouts=rollouts),
                mock,
                pairs=pairs,
            )
            for name in names
        ]


def sweep_loops(
    workload: str,
    *,
    in_flight: Sequence[int],
    rollouts: int | None = None,
) -> dict[str, list[tuple[int, Measurement]]]:
    """B1, B2 and the pipeline on one workload, at several concurrencies."""
    with MockServer() as mock:
        return sweep(
            [BareLoop("B1"), BareLoop("B2"), FreshPipeline()],
            WORKLOADS[workload].resized(rollouts=rollouts),
            mock,
            in_flight=in_flight,
        )


def write_sweep_charts(
    found: Mapping[str, Sequence[tuple[int, Measurement]]], workload: str, folder: Path
) -> list[Path]:
    """Throughput and CPU over concurrency, as two SVG files."""
    charts = {
        "throughput": Chart(
            f"Throughput over concurrency, {workload}",
            "rollouts in flight",
            "rollouts per second",
            [
                Series(name, [(level, one.rollouts_per_s) for level, one in measured])
                for name, measured in found.items()
            ],
        ),
        "cpu": Chart(
            f"CPU over concurrency, {workload}",
            "rollouts in flight",
            "CPU ms per rollout",
            [
                Series(name, [(level, one.cpu_ms_per_rollout) for level, one in measured])
                for name, measured in found.items()
            ],
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for kind, chart in charts.items():
        path = folder / f"{kind}-{workload.lower()}.svg"
        path.write_text(chart.svg())
        paths.append(path)
    return paths
