"""`rollout cancel`, `pause`, `continue`, `retry`: the operations on a run.

Irreversible operations show their counts and ask for confirmation.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.contract.rollout import RolloutState, RunState
from pipeline.store.operations import (
    begin_cancel,
    cancel_rollouts,
    continue_run,
    count_retryable,
    pause_run,
    retry_rollouts,
)
from pipeline.store.rollout_filter import RolloutFilter, of_class, parse_filter
from pipeline.store.status import run_status
from rollout.deployment import opened
from rollout.options import DryRun, Json, RunName, Yes, parse_error_class
from rollout.output import confirm, print_answer


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
        status = deployment.transact(lambda connection: run_status(connection, found))
        cancelled = status.n_open
        if not (dry_run or status.is_done):
            confirm(f"Cancel {cancelled} rollouts of run {found.slug}?", yes=yes)
            deployment.transact(lambda connection: begin_cancel(connection, found, reason=reason))
            cancelled = 0
            while some := deployment.transact(
                lambda connection: cancel_rollouts(connection, found)
            ):
                cancelled += some
    print_answer(
        {"run": found.slug, "cancelled": cancelled, "dry_run": dry_run},
        f"{cancelled} rollouts of run {found.slug} {_did('cancelled', dry_run)}.",
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
        changed = deployment.transact(
            lambda connection: pause_run(connection, found, reason=reason)
        )
    text = f"Run {found.slug} {'is paused' if changed else 'was paused already'}."
    print_answer({"run": found.slug, "state": "paused", "changed": changed}, text, as_json=as_json)


def continue_(ctx: typer.Context, run: RunName, as_json: Json = False) -> None:
    """Dispatch rollouts of a paused run again."""
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        changed = deployment.transact(lambda connection: continue_run(connection, found))
    text = f"Run {found.slug} {'goes on' if changed else 'was not paused'}."
    print_answer({"run": found.slug, "state": "active", "changed": changed}, text, as_json=as_json)


def retry(
    ctx: typer.Context,
    run: RunName,
    error_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="Only errors of this class.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR", help="Only matching rollouts: \"'timeout' in message and turns > 2\"."
        ),
    ] = None,
    cancelled: Annotated[
        bool, typer.Option("--cancelled", help="Cancelled rollouts instead of failed ones.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Queue failed rollouts of a run again.

    A rollout stays as it is if a trainer already has its group.
    """
    condition = _condition(error_class, where)
    state = RolloutState.CANCELLED if cancelled else RolloutState.FAILED
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        count = deployment.transact(
            lambda connection: count_retryable(connection, found, condition, state=state)
        )
        if count.allowed and not dry_run:
            confirm(f"Queue {count.allowed} {state} rollouts of run {found.slug} again?", yes=yes)
            count = deployment.transact(
                lambda connection: retry_rollouts(connection, found, condition, state=state)
            )
    text = f"{count.allowed} {state} rollouts of run {found.slug} {_did('queued again', dry_run)}."
    if count.refused:
        text += f" {count.refused} stay as they are: a trainer has their group, or it has enough."
    if found.state is RunState.PAUSED:
        text += f" The run is paused; go on with: rollout continue {found.slug}"
    print_answer(
        {
            "run": found.slug,
            "retried": count.allowed,
            "refused": count.refused,
            "dry_run": dry_run,
        },
        text,
        as_json=as_json,
    )


def _condition(error_class: str | None, where: str | None) -> RolloutFilter:
    condition = RolloutFilter()
    if chosen := parse_error_class(error_class):
        condition = condition.and_also(of_class(chosen))
    return condition.and_also(parse_filter(where)) if where is not None else condition


def _did(participle: str, dry_run: bool) -> str:
    return f"would be {participle}" if dry_run else f"are {participle}"
