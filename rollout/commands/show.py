"""`rollout show`: a run, a group, or a rollout with its conversation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.contract.trajectory import TrajectoryRecord
from pipeline.queue.payloads import open_payloads
from pipeline.store.inspection import (
    StoredBody,
    find_group,
    find_rollout,
    read_group,
    read_rollout,
)
from pipeline.store.runs import find_run
from pipeline.store.samples import list_groups
from pipeline.store.status import run_status
from pipeline.trainer.bodies import read_record, read_tokens
from rollout.deployment import Deployment, opened
from rollout.options import Json, RunName
from rollout.output import print_json, print_table
from rollout.rollout_tables import print_group, print_groups, print_messages, print_rollout
from rollout.segment_tables import print_segments, segments_document
from rollout.tables import print_status

if TYPE_CHECKING:
    from pipeline.tokens.segments import Segments

show = typer.Typer(help="Show a run, a group or a rollout.", no_args_is_help=True)

GroupName = Annotated[
    str, typer.Argument(metavar="GROUP", help="A label (math7-g000013) or the prefix of an id.")
]
RolloutName = Annotated[
    str,
    typer.Argument(metavar="ROLLOUT", help="A label (math7-g000013-r3) or the prefix of an id."),
]


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
    print_table(("asked for", "value"), _rows(config))
    print_table(("came from", "value"), _rows(origin))
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
        stored = _stored(found, attempt)
        record = _record(deployment, stored) if messages or raw or as_json else None
        merged = _segments(deployment, stored) if tokens else None
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


def _rows(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the rows of a run's table; empty fields are left out."""
    return [
        (name, value if isinstance(value, (str, int, float)) else json.dumps(value))
        for name, value in values.items()
        if value not in (None, {}, [])
    ]


def _stored(found: dict[str, Any], attempt: int | None) -> StoredBody | None:
    wanted = attempt or found["winner_attempt_no"]
    stored = [
        each["trajectory"]
        for each in found["attempts"]
        if each["trajectory"] is not None and wanted in (None, each["attempt_no"])
    ]
    return stored[-1] if stored else None


def _record(deployment: Deployment, stored: StoredBody | None) -> TrajectoryRecord | None:
    return read_record(stored, open_payloads(deployment.settings)) if stored else None


def _segments(deployment: Deployment, stored: StoredBody | None) -> Segments:
    # These modules load numpy, which no other command of this module needs.
    from pipeline.tokens.segments import merge_calls
    from pipeline.tokens.token_body import unpack_tokens

    body = read_tokens(stored, open_payloads(deployment.settings)) if stored else b""
    return merge_calls(unpack_tokens(body))
