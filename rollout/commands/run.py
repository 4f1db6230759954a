"""`rollout run` and `resume`: execute a run on this machine, and wait for its end."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.store.status import RunStatus
from rollout.deployment import settings_of
from rollout.local_run import resume_run, run_dataset
from rollout.options import Json, LocalOptions, RunName, WorkerOptions, takes
from rollout.output import note, print_json
from rollout.run_options import SubmitOptions
from rollout.submission import Submission
from rollout.tables import exit_code, print_status


@takes(SubmitOptions, "options")
@takes(WorkerOptions, "worker")
@takes(LocalOptions, "local")
def run(
    ctx: typer.Context,
    options: SubmitOptions,
    worker: WorkerOptions,
    local: LocalOptions,
    as_json: Json = False,
) -> None:
    """Run a dataset through an agent here, and wait.

    Workers and a controller are started on this machine and stopped at the end; private servers go
    on. Exit code 4 means that the run failed: more than half of its rollouts failed, or all of the
    first ones, after which the run is paused. --max-error-rate sets another share; 1 allows every
    failure.
    """

    def print_enqueued(submission: Submission) -> None:
        if as_json and not local.wait:
            print_json(submission.to_json())
        else:
            note(str(submission))

    final = run_dataset(settings_of(ctx), options, worker, local, on_enqueued=print_enqueued)
    _end(final, as_json=as_json)


@takes(WorkerOptions, "worker")
@takes(LocalOptions, "local")
def resume(
    ctx: typer.Context,
    worker: WorkerOptions,
    local: LocalOptions,
    run: RunName = "@last",
    base_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="New endpoint of the run; repeat for replicas."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Resume a run that was interrupted.

    The command starts processes on this machine as `rollout run` does, and waits for the end.
    """
    urls = tuple(base_url or ())
    final = resume_run(settings_of(ctx), run, worker, local, base_urls=urls)
    _end(final, as_json=as_json)


def _end(final: RunStatus | None, *, as_json: bool) -> None:
    if final is None:
        return
    print_status(final, as_json=as_json)
    raise typer.Exit(exit_code(final, go_on="resume"))
