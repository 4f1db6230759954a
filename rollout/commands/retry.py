"""`rollout retry`: queue failed or cancelled rollouts of a run again."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.contract.rollout import RolloutState, RunState
from pipeline.store.operations import count_retryable, retry_rollouts
from pipeline.store.rollout_filter import RolloutFilter, of_class, parse_filter
from rollout.deployment import opened
from rollout.options import DryRun, Json, RunName, Yes, parse_error_class
from rollout.output import confirm, did, print_answer


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
        count = deployment.transact(count_retryable, found, condition, state=state)
        if count.allowed and not dry_run:
            confirm(f"Queue {count.allowed} {state} rollouts of run {found.slug} again?", yes=yes)
            count = deployment.transact(retry_rollouts, found, condition, state=state)
    text = f"{count.allowed} {state} rollouts of run {found.slug} {did('queued again', dry_run)}."
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
