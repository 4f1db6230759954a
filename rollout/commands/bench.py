"""`rollout bench`: the goals of docs/performance.md, and the faults of docs/reliability.md."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from pipeline.contract.errors import ConfigError


def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="loops, concurrency, kill, handover, store, scaling; all when none is named. "
            "Or faults, alone: does everything survive?"
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs per comparison.")] = 5,
    rows: Annotated[int, typer.Option(min=1000, help="Rollouts in the store.")] = 1_000_000,
    plots: Annotated[
        str | None, typer.Option(help="Draw how the store grows, as SVG files in this folder.")
    ] = None,
    rollouts: Annotated[
        int, typer.Option(min=100, help="faults: rollouts in the longest phase.")
    ] = 5000,
    broker: Annotated[str, typer.Option(help="faults: redis or rabbitmq.")] = "redis",
    seed: Annotated[int, typer.Option(help="faults: of all that is drawn.")] = 1,
    json: Annotated[str | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure this machine against the bare loop.

    Private servers and a mock model are started for it.
    """
    if importlib.util.find_spec("benchmarks") is None:
        raise ConfigError(
            "The benchmarks are not installed.", remedy="Run it in a checkout: make bench"
        )
    from benchmarks.__main__ import main

    if parts == ["faults"]:
        arguments = ["faults", "--broker", broker]
        arguments += ["--rollouts", str(rollouts), "--seed", str(seed)]
    else:
        arguments = ["goals", "--pairs", str(pairs), "--rows", str(rows)]
        if parts:
            arguments += ["--parts", *parts]
        if plots:
            arguments += ["--plots", plots]
    if json:
        arguments += ["--json", json]
    main(arguments)
