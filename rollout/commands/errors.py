"""`rollout errors`: the errors of a run by error class, by tool, or by worker."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from pipeline.store.run_errors import errors_by_class, errors_by_worker, list_tracebacks
from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import print_json
from rollout.tables import print_errors, print_tracebacks
from rollout.tool_errors import errors_by_tool

_BY = ("class", "tool", "worker")


def errors(
    ctx: typer.Context,
    run: RunName = "@last",
    by: Annotated[str, typer.Option(metavar="class|tool|worker", help="Grouping.")] = "class",
    trace: Annotated[
        bool, typer.Option("--trace", help="Also print tracebacks, equal ones once.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Tracebacks to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Count the errors of a run by class, tool or worker."""
    if by not in _BY:
        raise InputError(f"--by cannot be {by!r}.", remedy=f"Known: {', '.join(_BY)}.")
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        if by == "tool":
            rows = errors_by_tool(deployment, found)
        else:
            read = errors_by_class if by == "class" else errors_by_worker
            rows = deployment.transact(read, found)
        tracebacks = deployment.transact(list_tracebacks, found, limit=limit) if trace else []
    if as_json:
        document = {"run": found.slug, "by": by, "errors": rows}
        print_json(document | ({"tracebacks": tracebacks} if trace else {}))
    elif not rows:
        print(f"No errors in run {found.slug}.")
    else:
        print_errors(rows, by=by)
        if trace:
            print_tracebacks(tracebacks)
