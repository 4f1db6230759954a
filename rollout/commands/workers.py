"""`rollout worker`: a process that runs agents and scores their rollouts."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pipeline.service import reduce_garbage_collection
from rollout.deployment import settings_of, with_broker
from rollout.logs import log_to_stderr
from rollout.options import Json, WhileStdin, WorkerOptions, takes
from rollout.output import print_json
from rollout.signals import end_with_stdin


@takes(WorkerOptions, "options")
def worker(
    ctx: typer.Context,
    options: WorkerOptions,
    queues: Annotated[
        str | None,
        typer.Option("--queues", "-Q", help="Queues to take requests from, separated by commas."),
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(min=0, help="Time to finish after SIGTERM.")
    ] = None,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Run agents and score their rollouts, many at once.

    The process runs until SIGTERM or Ctrl-C.
    """
    settings = settings_of(
        ctx,
        {
            "worker": {
                "concurrency": options.concurrency,
                "plugins": tuple(options.plugin) if options.plugin else None,
                "queues": tuple(queues.split(",")) if queues else None,
                "drain_s": drain_s,
            }
        },
    )
    log_to_stderr(settings.log_level)
    settings = with_broker(settings)
    if while_stdin:
        end_with_stdin()
    from workers.process.worker import run_worker

    def ready(worker_id: str) -> None:
        reduce_garbage_collection()
        if as_json:
            print_json({"ready": True, "worker": worker_id, "pid": os.getpid()})

    raise typer.Exit(run_worker(settings, ready=ready))
