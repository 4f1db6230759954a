"""`rollout bench`: the goals of docs/performance.md, measured on this machine."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from pipeline.contract.errors import ConfigError


def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="loops, concurrency, kill, handover, store, scaling; all when none is named."
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs per comparison.")] = 5,
    rows: Annotated[int, typer.Option(min=1000, help="Rollouts in the store.")] = 1_000_000,
    plots: Annotated[
        str | None, typer.Option(help="Draw how the store grows, as SVG files in this folder.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure this machine: private servers, a mock model, and the bare loop beside it."""
    if importlib.util.find_spec("benchmarks") is None:
        raise ConfigError(
            "The benchmarks are not installed.", remedy="Run it in a checkout: make bench"
        )
    from benchmarks.__main__ import main

    arguments = ["goals", "--pairs", str(pairs), "--rows", str(rows)]
    if parts:
        arguments += ["--parts", *parts]
    if plots:
        arguments += ["--plots", plots]
    if json:
        arguments += ["--json", json]
    main(arguments)
