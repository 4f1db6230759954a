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
from rollout.output import print_fields, print_json
from rollout.rollout_tables import print_group, print_groups, print_messages, print_rollout
from rollout.segment_tables import print_segments, segments_document
from rollout.stored_attempts import record_of, segments_of, stored_body
from rollout.tables import print_status

show = typer.Typer(help="Show a run, a group or a rollout.", no_args_is_help=True)


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
    config = found.config.model_dump(mode="json")
    origin = found.origin.model_dump(mode="json")
    if as_json:
        print_json(
            status.to_json()
            | {
                "drops": status.drops,
                "waits": list(status.waits),
                "reason": found.state_reason,
                "policy_version": found.policy_version,
                "created_at": found.created_at.isoformat(),
                "config": config,
                "first_groups": groups,
                "origin": origin,
            }
        )
        return
    print_status(status)
    print_fields("asked for", config)
    print_fields("came from", origin)
    print_groups(groups, total=sum(status.groups.values()))


@show.command("group")
def show_group(ctx: typer.Context, group: GroupName, as_json: Json = False) -> None:
    """Show a group: its prompt and its rollouts."""
    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: read_group(connection, find_group(connection, group))
        )
    if as_json:
        print_json(found)
        return
    print_group(found)


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
        stored = stored_body(found, attempt)
        record = record_of(deployment, stored) if messages or raw or as_json else None
        merged = segments_of(deployment, stored) if tokens else None
    for each in found["attempts"]:
        del each["trajectory"]
    if raw and not as_json:
        print_json(record.model_dump() if record else None)
    elif as_json:
        print_json(
            found
            | {"messages": record.messages if record else []}
            | ({"record": record.model_dump() if record else None} if raw else {})
            | (segments_document(merged) if merged else {})
        )
    else:
        print_rollout(found)
        if messages:
            print_messages(record)
        if merged:
            print_segments(merged)
