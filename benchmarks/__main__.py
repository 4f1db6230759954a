"""`python -m benchmarks`, also `make bench`: the command line of the benchmarks.

Without the name of a command it measures the goals. Must not: hold any measuring code.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks import goals as goal_parts
from benchmarks import report
from benchmarks.faults.campaign import run_campaign
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.report import campaign_table
from benchmarks.faults.resume import run_trial, trial_size
from benchmarks.faults.runs import GROUP_SIZE
from benchmarks.faults.servers import BrokerMissing
from benchmarks.footprint import measure_footprint
from benchmarks.gateway import measure_gateway
from benchmarks.growth import StoreTimes, growth_table
from benchmarks.limits import measure_limits
from benchmarks.scaling import SCALING_ROLLOUTS, measure_scaling, scaling_table
from benchmarks.soak import measure_soak
from benchmarks.tokens import measure_tokens
from benchmarks.train_batches import measure_pull
from benchmarks.workloads import WORKLOADS

app = typer.Typer(
    help="Measure the pipeline on private servers against a mock model. The default is `goals`.",
    pretty_exceptions_enable=False,
)


class Part(StrEnum):
    """The parts that can be measured separately; typer supports lists only of enumerations."""

    loops = "loops"
    concurrency = "concurrency"
    kill = "kill"
    handover = "handover"
    store = "store"


Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]


@app.command()
def goals(
    parts: Annotated[list[Part] | None, typer.Argument(help="Default: all parts.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs per comparison.")] = 5,
    rows: Annotated[int, typer.Option(min=1000, help="Rollouts in the store.")] = 1_000_000,
    json_path: Json = None,
) -> None:
    """Measure G1 to G13, each beside its goal."""
    chosen = parts or list(Part)
    figures: list[report.Figure] = []
    comparisons = []
    times: list[StoreTimes] = []
    if "loops" in chosen:
        figures, comparisons = goal_parts.measure_loops(pairs=pairs)
    for name, measure in goal_parts.PARTS.items():
        if name in chosen:
            figures += measure()
    if "store" in chosen:
        store, times = goal_parts.measure_store(rows=rows, pairs=pairs)
        figures += store
    print(report.figure_table(figures))
    if comparisons:
        print(report.comparison_table(comparisons))
    if times:
        print(growth_table(times))
    _save(json_path, report.to_json(figures, comparisons) | {"growth": [asdict(t) for t in times]})


@app.command()
def limits(
    seconds: Annotated[float, typer.Option(help="Duration for each kind of limit.")] = 20.0,
    json_path: Json = None,
) -> None:
    """Measure the calls that three processes get under one limit."""
    figures = asyncio.run(measure_limits(seconds=seconds))
    _report(figures, json_path)
    if any(figure.verdict == "missed" for figure in figures):
        sys.exit("a limit was missed")


@app.command()
def gateway(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 5, json_path: Json = None
) -> None:
    """Measure what the gateway adds to a model call, and 500 streams at once."""
    _report(asyncio.run(measure_gateway(pairs=pairs)), json_path)


@app.command()
def pull(
    groups: Annotated[int, typer.Option(min=1, help="Groups of the batch, of 8 rollouts.")] = 64,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a rollout, about.")] = 8192,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of a pull and a reading.")] = 9,
    json_path: Json = None,
) -> None:
    """Measure the pull of a large batch beside reading the same arrays from a file."""
    _report(measure_pull(groups=groups, tokens=tokens, pairs=pairs), json_path)


@app.command()
def tokens(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs.")] = 3,
    rollouts: Annotated[int | None, typer.Option(min=1, help="Default: those of W3.")] = None,
    json_path: Json = None,
) -> None:
    """Measure what long conversations with token ids cost, in bytes and in CPU."""
    figures, comparison = measure_tokens(WORKLOADS["W3"].resized(rollouts=rollouts), pairs=pairs)
    print(report.figure_table(figures))
    print(report.comparison_table([comparison]))
    _save(json_path, report.to_json(figures, [comparison]))


@app.command()
def soak(
    workload: Literal["W0", "W1", "W1s", "W2"] = "W0",
    rollouts: int = 50_000,
    json_path: Json = None,
) -> None:
    """Measure whether memory stays flat over a long run."""
    found = measure_soak(WORKLOADS[workload].resized(rollouts=rollouts))
    print(report.soak_table(found))
    _save(json_path, {**found.to_json(), **report.to_json()})
    if not found.is_flat or found.finished != found.rollouts:
        sys.exit("memory is not flat, or not all rollouts were finished")


@app.command()
def scaling(rollouts: int = SCALING_ROLLOUTS, json_path: Json = None) -> None:
    """Measure with more worker and collector processes, and the bytes of one rollout."""
    footprint = measure_footprint()
    found = measure_scaling(rollouts=rollouts)
    print(scaling_table(found))
    print(report.table(["bytes a rollout", ""], [[k, f"{v:,.0f}"] for k, v in footprint.items()]))
    document = {"bytes": footprint, "deployments": [one.to_json() for one in found]}
    _save(json_path, report.to_json() | document)


@app.command()
def faults(
    broker: Literal["redis", "rabbitmq", "sqs"] = "redis",
    rollouts: Annotated[int, typer.Option(min=100, help="Rollouts of the longest phase.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
    json_path: Json = None,
) -> None:
    """Run every fault of docs/reliability.md on private servers; exit code 1 on a violation."""
    try:
        campaign = run_campaign(broker=broker, rollouts=rollouts, seed=seed)
    except BrokerMissing as error:
        sys.exit(str(error))
    print(campaign_table(campaign))
    _save(json_path, campaign.to_json() | {"machine": report.machine()})
    if campaign.violations:
        sys.exit(1)


@app.command()
def resume(
    broker: Literal["redis", "rabbitmq", "sqs"] = "redis",
    rollouts: Annotated[int, typer.Option(min=8)] = 400,
    in_flight: Annotated[int, typer.Option(min=4)] = 200,
    turns: Annotated[int, typer.Option(min=2, help="Model calls of a rollout.")] = 10,
    latency_ms: Annotated[float, typer.Option(help="Of one model call.")] = 1000.0,
    kill_every_calls: Annotated[int, typer.Option(help="Model calls between two kills.")] = 1000,
    after_s: Annotated[float, typer.Option(help="The setting journal.after_s.")] = 0.0,
    seed: int = 1,
    json_path: Json = None,
) -> None:
    """Kill workers, and count the model calls that are made again; exit code 1 on a violation."""
    size = trial_size(
        in_flight=in_flight, workers=4, turns=turns, latency_ms=latency_ms, after_s=after_s
    )
    try:
        with Deployment(broker, size) as deployment:
            found = run_trial(
                deployment,
                groups=-(-rollouts // GROUP_SIZE),
                kill_every_calls=kill_every_calls,
                seed=seed,
                log=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except BrokerMissing as error:
        sys.exit(str(error))
    figures = {key: value for key, value in found.to_json().items() if key != "violations"}
    print(report.table(["figure", "value"], [[k, f"{v:g}"] for k, v in figures.items()]))
    _save(json_path, found.to_json() | {"machine": report.machine(), "after_s": after_s})
    if found.violations or found.unequal:
        sys.exit("\n".join([*found.violations, f"{found.unequal} trajectories differ"]))


def _report(figures: list[report.Figure], path: Path | None) -> None:
    print(report.figure_table(figures))
    _save(path, report.to_json(figures))


def _save(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str]) -> None:
    """Run a command; `goals` if the first argument is not a command."""
    named = {command.callback.__name__ for command in app.registered_commands if command.callback}
    is_named = bool(arguments) and (arguments[0] in named or arguments[0] == "--help")
    app(arguments if is_named else ["goals", *arguments], prog_name="python -m benchmarks")


if __name__ == "__main__":
    main(sys.argv[1:])
