"""`rollout runs`, `status`, `watch`: the list of runs, and their progress."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.store.runs import find_run, list_runs
from pipeline.store.status import run_status
from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import note, number, print_json, print_table
from rollout.progress import wait_for_run
from rollout.signals import EXIT_INTERRUPTED
from rollout.tables import exit_code, print_status


def runs(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Only the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """List the runs, newest first."""
    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: [
                (run, run_status(connection, run)) for run in list_runs(connection, limit=limit)
            ]
        )
    if as_json:
        print_json(
            {
                "runs": [
                    status.to_json() | {"created_at": run.created_at.isoformat()}
                    for run, status in found
                ]
            }
        )
        return
    print_table(
        ("run", "state", "created", "rollouts", "succeeded", "failed", "reward", "ready groups"),
        [
            (
                run.slug,
                status.state,
                f"{run.created_at:%Y-%m-%d %H:%M:%S}",
                status.rollouts["total"],
                status.rollouts["succeeded"],
                status.rollouts["failed"],
                number(status.reward_mean),
                status.groups["ready"],
            )
            for run, status in found
        ],
        right=("rollouts", "succeeded", "failed", "reward", "ready groups"),
    )


def status(ctx: typer.Context, run: RunName = "@last", as_json: Json = False) -> None:
    """Show a run's progress and the reasons for its waits."""
    with opened(ctx) as deployment:
        found = deployment.transact(
            lambda connection: run_status(connection, find_run(connection, run))
        )
    print_status(found, as_json=as_json)


def watch(
    ctx: typer.Context,
    run: RunName = "@last",
    timeout_s: Annotated[float | None, typer.Option(min=0, help="Longest wait.")] = None,
    as_json: Json = False,
) -> None:
    """Follow a run until it is done.

    Ctrl-C ends only this command; the run goes on. Exit code 4 means that the run failed.
    """
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        try:
            final = wait_for_run(deployment, found, timeout_s=timeout_s)
        except KeyboardInterrupt:
            note(f"The run goes on. Watch it again: rollout watch {found.slug}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    print_status(final, as_json=as_json)
    raise typer.Exit(exit_code(final, go_on="continue"))
