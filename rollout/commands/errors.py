"""`rollout errors`: the errors of a run by error class, by tool, or by worker."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from pipeline.contract.activity import UNREADABLE_CALLS
from pipeline.contract.errors import InputError
from pipeline.queue.payloads import open_payloads
from pipeline.store.inspection import errors_by_class, errors_by_worker, read_bodies
from pipeline.store.runs import Run
from pipeline.store.tracebacks import list_tracebacks
from pipeline.trainer.bodies import try_read_record
from rollout.deployment import Deployment, opened
from rollout.options import Json, RunName
from rollout.output import note, print_json, safe_text
from rollout.tables import print_errors
from workers.core.trajectory import LOST_CALLS

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
            rows = deployment.transact(lambda connection: read(connection, found))
        tracebacks = (
            deployment.transact(lambda connection: list_tracebacks(connection, found, limit=limit))
            if trace
            else []
        )
    if as_json:
        document = {"run": found.slug, "by": by, "errors": rows}
        print_json(document | ({"tracebacks": tracebacks} if trace else {}))
    elif not rows:
        print(f"No errors in run {found.slug}.")
    else:
        print_errors(rows, by=by)
        if trace:
            _print_tracebacks(tracebacks)


def errors_by_tool(deployment: Deployment, run: Run) -> list[dict[str, Any]]:
    """Return the numbers of calls and failures of each tool."""
    payloads = open_payloads(deployment.settings)
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    unreadable = 0
    after = None
    while page := deployment.transact(
        lambda connection, after=after: read_bodies(connection, run, after=after)
    ):
        after = max(page)
        for row in page.values():
            record, error = try_read_record(row, payloads)
            unreadable += error is not None
            if record is None:
                continue
            for tool, figures in record.tools.items():
                calls[tool] += figures.get("calls", 0)
                failed[tool] += figures.get("errors", 0)
            if lost := record.metadata.get(LOST_CALLS, 0):
                calls[UNREADABLE_CALLS] += lost
                failed[UNREADABLE_CALLS] += lost
    if unreadable:
        note(f"{unreadable} trajectories are gone or damaged and were not counted.")
    return [{"tool": tool, "calls": n, "errors": failed[tool]} for tool, n in calls.most_common()]


def _print_tracebacks(tracebacks: list[dict[str, Any]]) -> None:
    if not tracebacks:
        print("No attempt left a traceback.")
    for each in tracebacks:
        kind = each["code"] or each["error_class"]
        print(f"── {each['attempts']} × {kind}, the last one {each['label']}")
        print(safe_text(each["traceback"].rstrip()))
