"""`rollout export`: a run's rollouts, or their segments of tokens, as a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.contract.errors import InputError
from pipeline.queue.payloads import open_payloads
from pipeline.trainer.export import export_run
from pipeline.trainer.export_files import STDOUT
from rollout.deployment import Deployment, opened
from rollout.options import Json, RunName
from rollout.output import note, print_json

if TYPE_CHECKING:
    from pipeline.store.runs import Run

_FORMATS = ("jsonl", "parquet", "inspect")
_SUFFIXES = {"inspect": "eval"}


def export(
    ctx: typer.Context,
    run: RunName,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="jsonl|parquet|inspect", help="Format (default: jsonl)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File; `-` is stdout (default: RUN with the format's suffix)."
        ),
    ] = None,
    segments: Annotated[
        bool,
        typer.Option("--segments", help="Token ids, a row for each segment; in Parquet."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run's rollouts to a file, one per line.

    Failed rollouts have an error instead of a reward.
    """
    to = to or ("parquet" if segments else "jsonl")
    if to not in _FORMATS:
        raise InputError(f"There is no format {to!r}.", remedy=f"Known: {', '.join(_FORMATS)}.")
    if segments and to != "parquet":
        raise InputError("Segments are written as Parquet only.", remedy="Use --to parquet.")
    if output == STDOUT and (to != "jsonl" or as_json):
        raise InputError("Only JSON Lines, and nothing else, can go to stdout.", remedy="Use -o.")
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        path = output or Path(f"{found.slug}.{_SUFFIXES.get(to, to)}")
        write = _segments if segments else _rollouts
        counts, sentence = write(deployment, found, path, to)
    if as_json:
        print_json({"run": found.slug, "path": str(path), **counts})
    elif output != STDOUT:
        print(f"{sentence}: {path}")


def _rollouts(deployment: Deployment, run: Run, path: Path, to: str) -> tuple[dict[str, Any], str]:
    payloads = open_payloads(deployment.settings)
    if to == "inspect":
        from pipeline.trainer.adapters.inspect_log import write_inspect_log

        report = write_inspect_log(deployment.engine, run, path, payloads=payloads)
    else:
        kind = "parquet" if to == "parquet" else "jsonl"
        report = export_run(deployment.engine, run, path, to=kind, payloads=payloads)
    if report.unfinished:
        note(f"{report.unfinished} rollouts are not done and were left out.")
    if report.unreadable:
        note(f"{report.unreadable} trajectories are gone or damaged; their lines say so.")
    return asdict(report), f"{report.rollouts} rollouts of run {run.slug} ({report.failed} failed)"


def _segments(deployment: Deployment, run: Run, path: Path, _: str) -> tuple[dict[str, Any], str]:
    from pipeline.trainer.adapters.segment_table import write_segments
    from pipeline.trainer.stored_groups import StoredGroups

    payloads = open_payloads(deployment.settings)
    groups = StoredGroups(deployment.engine, run, payloads=payloads)
    report = write_segments(groups, path, run=run.slug)
    if report.rollouts_without_rows:
        note(f"{report.rollouts_without_rows} rollouts have no recorded token ids, and no row.")
    if groups.unreadable:
        note(f"{groups.unreadable} groups have tokens that are gone or damaged; they are left out.")
    counts = asdict(report) | {"unreadable_groups": groups.unreadable}
    return counts, f"{report.rows} segments of {report.rollouts} rollouts of run {run.slug}"
