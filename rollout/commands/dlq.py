"""`rollout dlq`: list, requeue and delete messages and rollouts that could not be handled."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from sqlalchemy import Connection

from pipeline.contract.errors import InputError, PipelineError
from pipeline.redrive import redrive
from pipeline.store.dead_letters import (
    DeadLetter,
    drop_dead_letters,
    get_dead_letter,
    list_dead_letters,
)
from pipeline.store.runs import find_run
from rollout.deployment import opened
from rollout.options import DryRun, Json, Yes
from rollout.output import confirm, print_json, print_table, safe_text

dlq = typer.Typer(help="List, requeue and drop dead letters.", no_args_is_help=True)

#: Bytes of a message that `show` prints.
_SHOWN_BYTES = 2000

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

    def work(connection: Connection) -> list[DeadLetter]:
        run_id = find_run(connection, run).run_id if run else None
        return list_dead_letters(
            connection, kind=kind, run_id=run_id, redriven=redriven, limit=limit
        )

    with opened(ctx) as deployment:
        letters = deployment.transact(work)
    if as_json:
        print_json({"dead_letters": [_document(letter) for letter in letters]})
        return
    print_table(
        ("id", "kind", "of", "bytes", "first seen", "requeued", "reason"),
        [
            (
                letter.dead_letter_id,
                letter.kind,
                letter.label or letter.run,
                letter.body_bytes or None,
                f"{letter.first_seen_at:%Y-%m-%d %H:%M:%S}",
                "yes" if letter.redriven_at else "",
                letter.reason,
            )
            for letter in letters
        ],
        right=("id", "bytes"),
    )


@dlq.command("show")
def show(
    ctx: typer.Context,
    dead_letter_id: Annotated[int, typer.Argument(metavar="ID")],
    as_json: Json = False,
) -> None:
    """Show a dead letter with the beginning of its message."""
    with opened(ctx) as deployment:
        letter = deployment.transact(lambda c: get_dead_letter(c, dead_letter_id))
    body = (letter.body or b"")[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    if as_json:
        print_json(_document(letter) | {"body": body})
        return
    for name, value in _document(letter).items():
        print(f"{name}: {safe_text(str(value))}")
    if body:
        print(f"\n{safe_text(body)}")


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
    results: list[dict[str, Any]] = []
    with opened(ctx) as deployment:
        chosen = deployment.transact(lambda connection: _chosen(connection, ids, every))
        if chosen and not dry_run:
            confirm(f"Requeue {len(chosen)} dead letters?", yes=yes)
        for letter in chosen:
            try:
                # Each in its own transaction, so that one that fails does not undo the others.
                result = (
                    "would be tried"
                    if dry_run
                    else deployment.transact(
                        lambda connection, n=letter.dead_letter_id: redrive(connection, n)
                    )
                )
            except PipelineError as error:
                if len(chosen) == 1:
                    raise
                result = f"not this time: {error}"
            results.append({"id": letter.dead_letter_id, "kind": letter.kind, "result": result})
    if as_json:
        print_json({"requeued": results, "dry_run": dry_run})
        return
    print_table(("id", "kind", "result"), [tuple(each.values()) for each in results], right=("id",))


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
        chosen = deployment.transact(lambda connection: _chosen(connection, ids, every))
        numbers = [letter.dead_letter_id for letter in chosen]
        if numbers and not dry_run:
            confirm(f"Delete {len(numbers)} dead letters for good?", yes=yes)
            deployment.transact(lambda connection: drop_dead_letters(connection, numbers))
    if as_json:
        print_json({"dropped": numbers, "dry_run": dry_run})
    else:
        print(f"{len(numbers)} dead letters {'would be' if dry_run else 'are'} dropped.")


def _chosen(connection: Connection, ids: list[int] | None, every: bool) -> list[DeadLetter]:
    if bool(ids) == every:
        raise InputError("Name dead letters by their numbers, or say --all.", code="E104")
    if every:
        return list_dead_letters(connection, limit=1_000_000)
    return [get_dead_letter(connection, number) for number in dict.fromkeys(ids or ())]


def _document(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.dead_letter_id,
        "kind": letter.kind,
        "run": letter.run,
        "rollout_id": str(letter.rollout_id) if letter.rollout_id else None,
        "label": letter.label,
        "reason": letter.reason,
        "bytes": letter.body_bytes,
        "first_seen_at": letter.first_seen_at.isoformat(),
        "redriven_at": letter.redriven_at.isoformat() if letter.redriven_at else None,
    }
