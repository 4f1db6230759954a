"""The output of `rollout rescore`: the requested scores, or the values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.store.status import RunStatus
from rollout.output import note, print_answer, print_json
from rollout.rescore_wait import RescoreJob, RescoreWait
from rollout.tables import print_scores


def print_requested(job: RescoreJob, requested: int, *, dry_run: bool, as_json: bool) -> None:
    """Print the number of requested scores, and the command for workers of their queue."""
    verb = "would be" if dry_run else "are to be"
    print_answer(
        _document(job, requested, dry_run=dry_run),
        f"{requested} trajectories of run {job.run.slug} {verb} scored by {job.reward}.",
        as_json=as_json,
    )
    if not (dry_run or as_json):
        note(f"Workers of the queue {job.queue} score them: rollout worker --queues {job.queue}")


def print_scored(job: RescoreJob, ended: RescoreWait, status: RunStatus, *, as_json: bool) -> None:
    """Print the numbers of verdicts, and the means of the reward and its parts."""
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


def _document(job: RescoreJob, requested: int, *, dry_run: bool) -> dict[str, Any]:
    return {
        "run": job.run.slug,
        "reward": job.reward,
        "requested": requested,
        "dry_run": dry_run,
    }
