"""`rollout rm`: delete a run with all its stored data."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer

from pipeline.contract.errors import NotFound
from pipeline.queue.payloads import open_payloads
from pipeline.store.removal import (
    begin_removal,
    remove_groups,
    remove_rest,
    require_removable,
    seconds_since_cancel,
)
from pipeline.store.runs import Run
from pipeline.store.status import run_status
from rollout.deployment import Deployment, opened
from rollout.options import DryRun, Json, Yes
from rollout.output import confirm, counts, note, print_json

WholeName = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's whole name, or @last.", show_default=False)
]


def rm(
    ctx: typer.Context,
    run: WholeName,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete a run and everything stored of it.

    The run must be finished, paused or cancelled, without rollouts in flight. Its rows, dead
    letters and trajectories are deleted for good, and its name is free again.
    """
    with opened(ctx) as deployment:
        found = _exactly(deployment, run)
        deployment.transact(require_removable, found)
        status = deployment.transact(run_status, found)
        size = f"{status.rollouts['total']} rollouts of {sum(status.groups.values())} prompts"
        rows: dict[str, int] = {}
        bodies = 0
        if not dry_run:
            confirm(f"Delete run {found.slug} with {size} for good?", yes=yes)
            rows, bodies = remove(deployment, found)
    if as_json:
        print_json({"run": found.slug, "rows": rows, "bodies": bodies, "dry_run": dry_run})
    elif dry_run:
        print(f"Run {found.slug} with {size} would be deleted.")
    else:
        total = sum(rows.values())
        print(f"Run {found.slug} is deleted: {total} rows ({counts(rows)}) and {bodies} bodies.")


def remove(deployment: Deployment, run: Run) -> tuple[dict[str, int], int]:
    """Delete a run; return the number of rows by table, and of objects in the payload store.

    Raises:
        NotAllowed: The run is in use.
    """
    deployment.transact(begin_removal, run)
    _wait_for_workers(deployment, run)
    # Bodies first: after an interruption the rows still name them, and another call can go on.
    bodies = open_payloads(deployment.settings).delete_all(str(run.run_id))
    rows: Counter[str] = Counter()
    while (part := deployment.transact(remove_groups, run))["groups"]:
        rows.update(part)
    rows.update(deployment.transact(remove_rest, run))
    return dict(rows), bodies


def _exactly(deployment: Deployment, name: str) -> Run:
    """Find a run by its whole name, so that a script that removes `a` twice cannot remove `ab`."""
    found = deployment.find_run(name)
    if name not in (found.slug, "@last"):
        raise NotFound(f"There is no run {name!r}.", remedy=f"Do you mean {found.slug!r}?")
    return found


def _wait_for_workers(deployment: Deployment, run: Run) -> None:
    """Wait until workers know that the rollouts were cancelled a moment ago (ADR 0010)."""
    since = deployment.transact(seconds_since_cancel, run)
    left = 2 * deployment.settings.lease.heartbeat_s - since if since is not None else 0.0
    if left > 0:
        note(f"Its rollouts were just cancelled: waiting {left:.0f} s until all workers know.")
        time.sleep(left)
