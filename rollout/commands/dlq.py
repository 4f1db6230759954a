"""`rollout dlq`: list, requeue and delete messages and rollouts that could not be handled."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.redrive import redrive_all
from pipeline.store.dead_letters import drop_dead_letters, get_dead_letter, list_dead_letters
from rollout.dead_letters import Selection, print_letter, print_letters, print_requeued
from rollout.deployment import opened
from rollout.options import Json, takes
from rollout.output import did, print_answer

dlq = typer.Typer(no_args_is_help=True)


@dlq.command("list")
def list_(
    ctx: typer.Context,
    kind: Annotated[
        str | None, typer.Option(help="rollout, group, completion, heartbeat or request.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only dead letters of this run.")] = None,
    redriven: Annotated[
        bool, typer.Option("--redriven", help="Include requeued ones.", show_default=False)
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Only the newest.")] = 100,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first."""
    with opened(ctx) as deployment:
        run_id = deployment.find_run(run).run_id if run else None
        letters = deployment.transact(
            list_dead_letters, kind=kind, run_id=run_id, redriven=redriven, limit=limit
        )
    print_letters(letters, as_json=as_json)


@dlq.command("show")
def show(
    ctx: typer.Context,
    dead_letter_id: Annotated[int, typer.Argument(metavar="ID")],
    as_json: Json = False,
) -> None:
    """Show a dead letter with the beginning of its message."""
    with opened(ctx) as deployment:
        letter = deployment.transact(get_dead_letter, dead_letter_id)
    print_letter(letter, as_json=as_json)


@dlq.command("requeue")
@takes(Selection, "selection")
def requeue(ctx: typer.Context, selection: Selection) -> None:
    """Process dead letters again.

    Rollouts get a new budget of attempts. Completions are processed like newly received ones.
    Groups that were dropped become ready again.
    """
    with opened(ctx) as deployment:
        letters = selection.confirmed(deployment, "Requeue {} dead letters?")
        if selection.dry_run:
            results = ["would be tried"] * len(letters)
        else:
            results = redrive_all(deployment.engine, letters)
    print_requeued(letters, results, dry_run=selection.dry_run, as_json=selection.as_json)


@dlq.command("drop")
@takes(Selection, "selection")
def drop(ctx: typer.Context, selection: Selection) -> None:
    """Delete dead letters for good.

    The rollouts that they name stay as they are.
    """
    with opened(ctx) as deployment:
        letters = selection.confirmed(deployment, "Delete {} dead letters for good?")
        numbers = [letter.dead_letter_id for letter in letters]
        if not selection.dry_run:
            deployment.transact(drop_dead_letters, numbers)
    print_answer(
        {"dropped": numbers, "dry_run": selection.dry_run},
        f"{len(numbers)} dead letters {did('dropped', selection.dry_run)}.",
        as_json=selection.as_json,
    )
