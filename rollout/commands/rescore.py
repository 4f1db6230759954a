"""`rollout rescore`: score stored trajectories again, without their agents."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.store.status import run_status
from rollout.deployment import opened
from rollout.options import DryRun, Json, RunName, WorkerOptions, parse_error_class, takes
from rollout.rescore_tables import print_requested, print_scored
from rollout.rescoring import Rescorer

#: Exit code when no trajectory could be scored.
_EXIT_ALL_FAILED = 4


@takes(WorkerOptions, "local")
def rescore(
    ctx: typer.Context,
    run: RunName,
    local: WorkerOptions,
    reward: Annotated[
        str | None, typer.Option(help="Registered name of the reward (default: the run's own).")
    ] = None,
    error_class: Annotated[
        str | None,
        typer.Option("--class", metavar="CLASS", help="Only rollouts that failed with this class."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Workers to start if no worker reads the run's queue.")
    ] = 1,
    wait: Annotated[
        bool, typer.Option("--wait/--detach", help="Wait for the values, or only publish.")
    ] = True,
    wait_timeout_s: Annotated[
        float, typer.Option("--wait-timeout", min=0, help="Longest wait for a value, in seconds.")
    ] = 300.0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Score stored trajectories again, without their agents.

    A rollout that failed only in scoring becomes succeeded if it can be scored now. If no worker
    reads the run's queue, or with --plugin, a worker is started here.
    """
    with opened(ctx, broker=True) as deployment, Rescorer(deployment) as rescorer:
        job = rescorer.plan(
            run,
            reward=reward,
            error_class=parse_error_class(error_class),
            plugins=local.plugin,
            may_start=wait and workers > 0,
        )
        if dry_run or not wait:
            count = job.total if dry_run else rescorer.request(job, awaited=False)
            print_requested(job, count, dry_run=dry_run, as_json=as_json)
            return
        ended = rescorer.score(
            job, workers=workers, concurrency=local.concurrency, timeout_s=wait_timeout_s
        )
        status = deployment.transact(run_status, job.run)
    print_scored(job, ended, status, as_json=as_json)
    if ended.failed and not ended.scored:
        raise typer.Exit(_EXIT_ALL_FAILED)
