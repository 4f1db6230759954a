"""`rollout rescore`: score stored trajectories again, without their agents."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from pipeline.store.status import run_status
from rollout.deployment import Deployment, opened
from rollout.options import DryRun, Json, RunName, WorkerOptions, parse_error_class, takes
from rollout.output import note, print_answer, print_json
from rollout.rescoring import RescoreJob, Rescorer, RescoreWait
from rollout.tables import print_scores

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
            _print_request(job, count, dry_run=dry_run, as_json=as_json)
            return
        waiting = RescoreWait(deployment.engine, job, timeout_s=wait_timeout_s)
        rescorer.score(job, waiting, workers=workers, each=local.concurrency)
        _print_end(deployment, job, waiting, as_json=as_json)
    if waiting.failed and not waiting.scored:
        raise typer.Exit(_EXIT_ALL_FAILED)


def _document(job: RescoreJob, requested: int, *, dry_run: bool) -> dict[str, Any]:
    asked = {"run": job.run.slug, "reward": job.reward}
    return asked | {"requested": requested, "dry_run": dry_run}


def _print_request(job: RescoreJob, requested: int, *, dry_run: bool, as_json: bool) -> None:
    verb = "would be" if dry_run else "are to be"
    print_answer(
        _document(job, requested, dry_run=dry_run),
        f"{requested} trajectories of run {job.run.slug} {verb} scored by {job.reward}.",
        as_json=as_json,
    )
    if not (dry_run or as_json):
        note(f"Workers of the queue {job.queue} score them: rollout worker --queues {job.queue}")


def _print_end(
    deployment: Deployment, job: RescoreJob, ended: RescoreWait, *, as_json: bool
) -> None:
    status = deployment.transact(run_status, job.run)
    scores = [
        score
        for score in status.scores
        if score.name == job.reward or score.name.startswith(f"{job.reward}.")
    ]
    if as_json:
        means = [asdict(score) for score in scores]
        counts = {"scored": ended.scored, "failed": ended.failed, "scores": means}
        print_json(_document(job, ended.total, dry_run=False) | counts)
    else:
        print(f"{ended} by {job.reward}.")
        print_scores(scores)
    if ended.failed:
        note(f"{ended.failed} could not be scored. The first of them: {ended.reason}")
