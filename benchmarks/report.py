"""The output of a bench run: tables in Markdown, JSON, and the description of the machine.

The bench commands pass comparisons and figures. A figure that misses its goal stays in the table,
marked. Must not: measure, or leave out a figure.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.pairs import Comparison
from benchmarks.soak import PARTS, Soak

_PACKAGES = ("openai", "aiohttp", "uvloop", "celery", "psycopg", "redis", "rollout-pipeline")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its goal. Without `must` the figure is information only."""

    goal: str
    measure: str
    value: float
    unit: str = ""
    must: float | None = None
    stretch: float | None = None
    at_most: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        """`stretch`, `must` or `missed`: the highest goal that is reached; empty without a goal."""
        if self._reaches(self.stretch):
            return "stretch"
        if self._reaches(self.must):
            return "must"
        return "missed" if self.must is not None else ""

    def _reaches(self, goal: float | None) -> bool:
        if goal is None:
            return False
        return self.value <= goal if self.at_most else self.value >= goal


def machine() -> dict[str, Any]:
    """Return a description of this machine, without its host name."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def figure_table(figures: Iterable[Figure]) -> str:
    """Return a Markdown table of the figures with must, stretch and verdict."""
    rows = [
        [
            figure.goal,
            figure.measure,
            f"{_number(figure.value)}{' ' + figure.unit if figure.unit else ''}",
            _number(figure.must),
            _number(figure.stretch),
            figure.verdict,
            figure.note,
        ]
        for figure in figures
    ]
    return table(["#", "measure", "value", "must", "stretch", "reached", "note"], rows)


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """Return a Markdown table with a row per workload: both medians and the median ratio."""
    rows: list[list[str]] = []
    for found in comparisons:
        cpu = found.medians(lambda measured: measured.cpu_ms_per_rollout)
        rate = found.medians(lambda measured: measured.rollouts_per_s)
        wall = found.medians(lambda measured: measured.wall_s)
        rss = found.medians(lambda measured: measured.peak_rss_bytes / 2**20)
        rows.append(
            [
                found.workload,
                f"{found.subject} / {found.baseline}",
                f"{cpu[1]:.2f} / {cpu[0]:.2f} = {found.ratio('cpu'):.2f}",
                f"{wall[1]:.2f} / {wall[0]:.2f} = {found.ratio('wall'):.2f}",
                f"{rate[1]:.0f} / {rate[0]:.0f} = {found.ratio('rate'):.2f}",
                f"{rss[1]:.0f} / {rss[0]:.0f}",
                _seen(found),
            ]
        )
    heads = ["workload", "pair", "CPU ms/rollout", "wall s", "rollouts/s", "peak MiB", "mock saw"]
    return table(heads, rows)


def soak_table(found: Soak) -> str:
    """Return a table of each process's MiB in the tenths of a long run, and its growth."""
    rows = [
        [name, *(f"{held / 2**20:.0f}" for held in parts), f"{found.growth(name):.3f}"]
        for name, parts in found.memory.items()
    ]
    heads = ["MiB", *(f"{number}/{PARTS}" for number in range(1, PARTS + 1)), "last/second"]
    done = f"{found.finished} of {found.rollouts} rollouts ({found.workload}) in {found.wall_s} s"
    return f"{table(heads, rows)}\n{done}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def to_json(
    figures: Iterable[Figure] = (), comparisons: Iterable[Comparison] = ()
) -> dict[str, Any]:
    """Return all figures, with the command that measured them."""
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "machine": machine(),
        "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in figures],
        "comparisons": [found.to_json() for found in comparisons],
    }


def _seen(found: Comparison) -> str:
    """Return the mock's worst counts of the subject's runs, and its highest load."""
    seen = [subject.seen for _, subject in found.pairs]
    busy = max(run.mock_share for pair in found.pairs for run in pair)
    peak = min(one["peak_in_flight"] for one in seen)
    missing = max(one["rollouts_missing"] for one in seen)
    repeated = max(one["rollouts_repeated"] for one in seen)
    return f"{peak} in flight, {missing} missing, {repeated} repeated, {busy:.0%} busy"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _first(path: str, field: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return line.split(":", 1)[1].strip()
    return "0"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
