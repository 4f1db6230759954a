"""`rollout show`: a run, a group, or a rollout with its conversation."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.store.inspection import find_group, find_rollout, read_group, read_rollout
from pipeline.store.runs import find_run
from pipeline.store.samples import list_groups
from pipeline.store.status import run_status
from rollout.deployment import opened
from rollout.options import GroupName, Json, RolloutName, RunName
from rollout.output import print_json
from rollout.rollout_tables import (
    print_group,
    print_messages,
    print_rollout,
    print_run,
    rollout_document,
)
from rollout.segment_tables import print_segments
from rollout.stored_attempts import record_of, segments_of, take_body

show = typer.Typer(no_args_is_help=True)


@show.command("run")
def show_run(
    ctx: typer.Context,
    run: RunName = "@last",
    limit: Annotated[int, typer.Option(min=0, help="Number of groups to list.")] = 20,
    as_json: Json = False,
) -> None:
    """Show a run: its figures, configuration and groups."""
    with opened(ctx) as deployment:
        found, status, groups = deployment.transact(
            lambda connection: (
                found := find_run(connection, run),
                run_status(connection, found),
                list_groups(connection, found, limit=limit),
            )
        )
    print_run(found, status, groups, as_json=as_json)


@show.command("group")
def show_group(ctx: typer.Context, group: GroupName, as_json: Json = False) -> None:
    """Show a group: its prompt and its rollouts."""
    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: read_group(connection, find_group(connection, group))
        )
    print_group(found, as_json=as_json)


@show.command("rollout")
def show_rollout(
    ctx: typer.Context,
    rollout: RolloutName,
    messages: Annotated[bool, typer.Option("--messages", help="Print the conversation.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print the whole stored record as JSON.")
    ] = False,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Print the recorded tokens as a trainer gets them."),
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=1, help="Attempt of --messages, --tokens and --raw (default: the winner)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a rollout: its attempts, scores, conversation and tokens."""
    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: read_rollout(connection, find_rollout(connection, rollout))
        )
        body = take_body(found, attempt)
        record = record_of(deployment, body) if messages or raw or as_json else None
        merged = segments_of(deployment, body) if tokens else None
    if as_json:
        print_json(rollout_document(found, record, merged, raw=raw))
    elif raw:
        print_json(record.model_dump() if record else None)
    else:
        print_rollout(found)
        if messages:
            print_messages(record)
        if merged:
            print_segments(merged)
