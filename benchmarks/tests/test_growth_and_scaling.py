"""The tables of the growing store and of more processes."""

from __future__ import annotations

import pytest

from benchmarks.growth import StoreTimes, growth_table
from benchmarks.scaling import Deployment, scaling_table


def times(rollouts: int, *, pull_ms: float) -> StoreTimes:
    return StoreTimes(rollouts, 10, 100.0, 10.0, 200.0, 2.0, 1.0, 3.0, 9.0, pull_ms, 1.0, 90.0)


def deployment(*, cores_used: float, busiest: tuple[str, float]) -> Deployment:
    return Deployment(
        workers=1,
        collectors=1,
        finished=10,
        rollouts=10,
        rollouts_per_s=5.0,
        cpu_ms={"postgres": 0.5, "worker": 3.0},
        cores_used=cores_used,
        busiest=busiest,
        connections={"postgres": 4, "redis": 9},
    )


def test_growth_is_the_largest_store_over_the_smallest():
    table = growth_table([times(1_000, pull_ms=2.0), times(1_000_000, pull_ms=3.0)])
    (pull,) = (line for line in table.splitlines() if line.startswith("| pull"))
    assert [cell.strip() for cell in pull.split("|")[1:-1]] == ["pull", "2.00", "3.00", "1.50"]


@pytest.mark.parametrize(
    ("cores_used", "busiest", "limit"),
    [
        (1000.0, ("worker-0", 0.95), "all "),
        (0.95, ("worker-0", 0.95), "one core of worker-0"),
        (0.5, ("worker-0", 0.3), "no processor"),
    ],
)
def test_the_limit_is_what_has_no_more_to_give(cores_used, busiest, limit):
    assert deployment(cores_used=cores_used, busiest=busiest).limit.startswith(limit)


def test_the_table_of_processes_names_parts_and_connections():
    head, _, row = scaling_table(
        [deployment(cores_used=0.5, busiest=("worker-0", 0.3))]
    ).splitlines()
    assert "postgres ms" in head
    assert "4 / 9" in row
