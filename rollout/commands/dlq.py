"""`rollout dlq`: list, requeue and delete messages and rollouts that could not be handled."""

from __future__ import annotations

from typing import Annotated

import typer
from sqlalchemy import Connection

from pipeline.contract.errors import InputError
from pipeline.redrive import redrive_all
from pipeline.store.dead_letters import (
    DeadLetter,
    drop_dead_letters,
    get_dead_letter,
    list_dead_letters,
)
from rollout.dead_letter_tables import letter_document, print_letter, print_letters, print_requeued
from rollout.deployment import opened
from rollout.options import DryRun, Json, Yes
from rollout.output import confirm, did, print_answer, print_json

dlq = typer.Typer(help="List, requeue and drop dead letters.", no_args_is_help=True)

Ids = Annotated[
    list[int] | None, typer.Argument(metavar="[ID]...", help="Numbers, see `rollout dlq list`.")
]
Every = Annotated[
    bool, typer.Option("--all", help="All that have not been requeued.", show_default=False)
]


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
    if as_json:
        print_json({"dead_letters": [letter_document(letter) for letter in letters]})
    else:
        print_letters(letters)


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
def requeue(
    ctx: typer.Context,
    ids: Ids = None,
    every: Every = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Process dead letters again.

    Rollouts get a new budget of attempts. Completions are processed like newly received ones.
    Groups that were dropped become ready again.
    """
    with opened(ctx) as deployment:
        chosen = deployment.transact(_chosen, ids, every)
        if chosen and not dry_run:
            confirm(f"Requeue {len(chosen)} dead letters?", yes=yes)
        if dry_run:
            results = ["would be tried"] * len(chosen)
        else:
            results = redrive_all(deployment.engine, chosen)
    print_requeued(chosen, results, dry_run=dry_run, as_json=as_json)


@dlq.command("drop")
def drop(
    ctx: typer.Context,
    ids: Ids = None,
    every: Every = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good.

    The rollouts that they name stay as they are.
    """
    with opened(ctx) as deployment:
        chosen = deployment.transact(_chosen, ids, every)
        numbers = [letter.dead_letter_id for letter in chosen]
        if numbers and not dry_run:
            confirm(f"Delete {len(numbers)} dead letters for good?", yes=yes)
            deployment.transact(drop_dead_letters, numbers)
    print_answer(
        {"dropped": numbers, "dry_run": dry_run},
        f"{len(numbers)} dead letters {did('dropped', dry_run)}.",
        as_json=as_json,
    )


def _chosen(connection: Connection, ids: list[int] | None, every: bool) -> list[DeadLetter]:
    if bool(ids) == every:
        raise InputError("Name dead letters by their numbers, or say --all.", code="E104")
    if every:
        return list_dead_letters(connection, limit=1_000_000)
    return [get_dead_letter(connection, number) for number in dict.fromkeys(ids or ())]
