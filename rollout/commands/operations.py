"""`rollout cancel`, `pause`, `continue`: the operations on a run."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.store.operations import begin_cancel, cancel_all, continue_run, pause_run
from pipeline.store.status import run_status
from rollout.deployment import opened
from rollout.options import DryRun, Json, RunName, Yes
from rollout.output import confirm, did, print_answer


def cancel(
    ctx: typer.Context,
    run: RunName,
    reason: Annotated[str | None, typer.Option(help="Kept with the run.")] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """End a run before all its rollouts are done.

    Finished rollouts stay as they are; the others are cancelled.
    """
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        status = deployment.transact(run_status, found)
        cancelled = status.n_open
        if not (dry_run or status.is_done):
            confirm(f"Cancel {cancelled} rollouts of run {found.slug}?", yes=yes)
            deployment.transact(begin_cancel, found, reason=reason)
            cancelled = cancel_all(deployment.engine, found)
    print_answer(
        {"run": found.slug, "cancelled": cancelled, "dry_run": dry_run},
        f"{cancelled} rollouts of run {found.slug} {did('cancelled', dry_run)}.",
        as_json=as_json,
    )


def pause(
    ctx: typer.Context,
    run: RunName,
    reason: Annotated[str | None, typer.Option(help="Kept with the run.")] = None,
    as_json: Json = False,
) -> None:
    """Stop dispatching rollouts of a run.

    Running rollouts finish.
    """
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        changed = deployment.transact(pause_run, found, reason=reason)
    text = f"Run {found.slug} {'is paused' if changed else 'was paused already'}."
    print_answer({"run": found.slug, "state": "paused", "changed": changed}, text, as_json=as_json)


def continue_(ctx: typer.Context, run: RunName, as_json: Json = False) -> None:
    """Dispatch rollouts of a paused run again."""
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        changed = deployment.transact(continue_run, found)
    text = f"Run {found.slug} {'goes on' if changed else 'was not paused'}."
    print_answer({"run": found.slug, "state": "active", "changed": changed}, text, as_json=as_json)
