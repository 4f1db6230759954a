"""`python -m benchmarks goals|loops|sweep|capacity|limits|soak|scaling|faults`.

`rollout bench` runs the goals, and the faults if told so. Must not: hold any measuring code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import goals, report
from benchmarks.capacity import measure_capacity
from benchmarks.faults import campaign_command
from benchmarks.footprint import measure_footprint
from benchmarks.growth import StoreTimes, growth_table, write_growth_charts
from benchmarks.limits import measure_limits
from benchmarks.loops import compare_loops, sweep_loops, write_sweep_charts
from benchmarks.scaling import SCALING_ROLLOUTS, measure_scaling, scaling_figures, scaling_table
from benchmarks.soak import measure_soak
from benchmarks.workloads import WORKLOADS


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    options.run(options)


def run_loops(options: argparse.Namespace) -> None:
    found = compare_loops(options.workloads, pairs=options.pairs, rollouts=options.rollouts)
    print(report.comparison_table(found))
    _save(options.json, report.to_json(command=_command(), comparisons=found))


def run_goals(options: argparse.Namespace) -> None:
    figures: list[report.Figure] = []
    comparisons = []
    times: list[StoreTimes] = []
    if "loops" in options.parts:
        figures, comparisons = goals.measure_loops(pairs=options.pairs)
    for part in options.parts:
        if part in goals.PARTS:
            figures += goals.PARTS[part]()
    if "store" in options.parts:
        store, times = goals.measure_store(rows=options.rows, pairs=options.pairs)
        figures += store
    deployments = measure_scaling() if "scaling" in options.parts else []
    figures += scaling_figures(deployments)
    print(report.figure_table(figures))
    if comparisons:
        print(report.comparison_table(comparisons))
    if times:
        print(growth_table(times))
        if options.plots:
            print(*write_growth_charts(times, options.plots), sep="\n")
    if deployments:
        print(scaling_table(deployments))
    document = report.to_json(command=_command(), figures=figures, comparisons=comparisons)
    document |= {
        "growth": [asdict(one) for one in times],
        "deployments": [one.to_json() for one in deployments],
    }
    _save(options.json, document)


def run_sweep(options: argparse.Namespace) -> None:
    found = sweep_loops(options.workload, in_flight=options.in_flight, rollouts=options.rollouts)
    rows = [
        [name, str(level), f"{one.rollouts_per_s:.0f}", f"{one.cpu_ms_per_rollout:.2f}"]
        for name, measured in found.items()
        for level, one in measured
    ]
    print(report.table(["subject", "in flight", "rollouts/s", "CPU ms/rollout"], rows))
    for path in write_sweep_charts(found, options.workload, options.plots):
        print(path)


def run_capacity(options: argparse.Namespace) -> None:
    found = measure_capacity(duration_s=options.duration_s)
    print(json.dumps(found.to_json(), indent=2))
    _save(options.json, {**found.to_json(), "machine": report.machine()})
    if not found.enough:
        sys.exit("the mock does not serve five times what the fastest client asks for")


def run_limits(options: argparse.Namespace) -> None:
    figures = asyncio.run(measure_limits(seconds=options.seconds))
    print(report.figure_table(figures))
    _save(options.json, report.to_json(command=_command(), figures=figures))
    if any(figure.verdict == "missed" for figure in figures):
        sys.exit("a limit was missed")


def run_soak(options: argparse.Namespace) -> None:
    workload = WORKLOADS[options.workload].resized(rollouts=options.rollouts)
    found = measure_soak(workload, workers=options.workers, concurrency=options.concurrency)
    print(report.soak_table(found))
    _save(options.json, {**found.to_json(), "command": _command(), "machine": report.machine()})
    if not found.is_flat or found.finished != found.rollouts:
        sys.exit("memory is not flat, or not all rollouts were finished")


def run_scaling(options: argparse.Namespace) -> None:
    footprint = measure_footprint()
    found = measure_scaling(rollouts=options.rollouts)
    print(scaling_table(found))
    print(report.table(["bytes a rollout", ""], [[k, f"{v:,.0f}"] for k, v in footprint.items()]))
    document = {"command": _command(), "machine": report.machine(), "bytes": footprint}
    _save(options.json, document | {"deployments": [one.to_json() for one in found]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(required=True)
    loops = commands.add_parser("loops", help="B2 over B1, in pairs")
    loops.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["W0", "W1"])
    loops.add_argument("--pairs", type=int, default=5)
    loops.set_defaults(run=run_loops)
    every = commands.add_parser("goals", help="G1 to G13, each beside its goal")
    parts = ["loops", *goals.PARTS, "store", "scaling"]
    every.add_argument("--parts", nargs="+", choices=parts, default=parts)
    every.add_argument("--pairs", type=int, default=5)
    every.add_argument("--rows", type=int, default=1_000_000, help="rollouts in the store")
    every.add_argument("--json", type=Path, help="write all figures to this file")
    every.add_argument("--plots", type=Path, help="folder for SVG of growth")
    every.set_defaults(run=run_goals)
    sweep = commands.add_parser("sweep", help="B1, B2 and the pipeline over concurrency")
    sweep.add_argument("--workload", choices=sorted(WORKLOADS), default="W1")
    sweep.add_argument("--in-flight", type=int, nargs="+", default=[50, 100, 200, 500])
    sweep.add_argument("--plots", type=Path, default=Path("bench-plots"), help="folder for SVG")
    sweep.set_defaults(run=run_sweep)
    capacity = commands.add_parser("capacity", help="is the mock fast enough?")
    capacity.add_argument("--duration-s", type=float, default=3.0)
    capacity.set_defaults(run=run_capacity)
    limits = commands.add_parser("limits", help="what three processes are granted under one limit")
    limits.add_argument("--seconds", type=float, default=20.0, help="for each kind of limit")
    limits.set_defaults(run=run_limits)
    soak = commands.add_parser("soak", help="does memory stay flat over a long run?")
    soak.add_argument("--workload", choices=sorted(WORKLOADS), default="W0")
    soak.add_argument("--rollouts", type=int, default=50_000)
    soak.add_argument("--workers", type=int, default=1)
    soak.add_argument("--concurrency", type=int, default=500, help="attempts at once in a worker")
    soak.set_defaults(run=run_soak)
    scaling = commands.add_parser("scaling", help="more processes, and bytes of one rollout")
    scaling.add_argument("--rollouts", type=int, default=SCALING_ROLLOUTS)
    scaling.set_defaults(run=run_scaling)
    faults = commands.add_parser("faults", help="harms private servers: is all as promised?")
    campaign_command.add_arguments(faults)
    faults.set_defaults(run=campaign_command.run)
    for command in (loops, sweep):
        command.add_argument("--rollouts", type=int, help="instead of the workload's 1000")
    for command in (loops, capacity, limits, soak, scaling):
        command.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def _command() -> str:
    return " ".join(["python -m benchmarks", *sys.argv[1:]])


def _save(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
