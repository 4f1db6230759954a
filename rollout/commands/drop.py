"""`rollout drop`: keep a complete group from the trainers."""

from __future__ import annotations

import typer

from pipeline.store.dropped_groups import drop_group, find_holder
from pipeline.store.inspection import find_group, read_group
from rollout.deployment import opened
from rollout.options import DryRun, GroupName, Json, Yes
from rollout.output import confirm, print_answer

drop = typer.Typer(no_args_is_help=True)


@drop.command("group")
def drop_one(
    ctx: typer.Context,
    group: GroupName,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Drop a complete group for good, ready or leased.

    This is for groups that no trainer shall get, such as one with a damaged trajectory. A leased
    group leaves its batch; a trainer that has pulled it already still trains on it.
    """
    with opened(ctx) as deployment:
        group_id = deployment.transact(find_group, group)
        found = deployment.transact(find_holder, group_id)
        label = deployment.transact(read_group, group_id)["label"]
        holder = f", leased to step {found.step} of {found.consumer}" if found.consumer else ""
        if not dry_run:
            confirm(f"Drop group {label} ({found.state}{holder})?", yes=yes)
            deployment.transact(drop_group, group_id)
    print_answer(
        {
            "group": label,
            "before": found.state,
            "consumer": found.consumer,
            "step": found.step,
            "dry_run": dry_run,
        },
        f"Group {label} ({found.state}{holder}) {'would be' if dry_run else 'is'} dropped.",
        as_json=as_json,
    )
