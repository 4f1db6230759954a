"""`rollout db`: the schema of the trajectory store, and a check of its contents."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.store import schema
from pipeline.store.accounting import require_accounting
from pipeline.store.engine import transact
from pipeline.store.runs import find_run
from rollout.deployment import borrowed_store, settings_of
from rollout.options import Json
from rollout.output import print_answer

db = typer.Typer(no_args_is_help=True)


@db.command()
def upgrade(ctx: typer.Context, as_json: Json = False) -> None:
    """Upgrade the database to the newest schema.

    Concurrent calls are safe.
    """
    with borrowed_store(settings_of(ctx)) as engine:
        revision = schema.upgrade(engine)
    _print(revision, revision, f"The database has schema {revision}.", as_json=as_json)


@db.command()
def current(ctx: typer.Context, as_json: Json = False) -> None:
    """Print the database's schema revision, and the required one."""
    with borrowed_store(settings_of(ctx)) as engine:
        found, needed = schema.current(engine), schema.head()
    text = f"The database has schema {found or 'none'}; this version needs {needed}."
    _print(found, needed, text, as_json=as_json)


@db.command()
def check(
    ctx: typer.Context,
    run: Annotated[
        str, typer.Option(help="Compare every group and counter of this run with its rows.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Exit with code 3 unless the schema has the required revision.

    With --run, exit with code 1 if the run's rows contradict each other.
    """
    with borrowed_store(settings_of(ctx)) as engine:
        schema.require_current(engine)
        needed = schema.head()
        text = f"The database has schema {needed}, as it should."
        if run:
            checked = transact(engine, find_run, run)
            transact(engine, require_accounting, checked)
            text += f" Each group and rollout of {checked.slug} is in exactly one place."
    _print(needed, needed, text, as_json=as_json)


def _print(current: str | None, head: str, text: str, *, as_json: bool) -> None:
    print_answer({"current": current, "head": head}, text, as_json=as_json)
