"""`rollout worker` and `rollout controller`: the processes of the pipeline.

Both run until SIGTERM or Ctrl-C, and then shut down orderly.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from pipeline.service import spare_garbage_collection
from rollout.deployment import open_deployment, settings_of, with_broker
from rollout.logs import log_to_stderr
from rollout.options import Json, WorkerOptions, takes
from rollout.output import print_json

WhileStdin = Annotated[
    bool, typer.Option("--while-stdin", hidden=True, help="End when stdin is closed.")
]


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
        spare_garbage_collection()
        if as_json:
            print_json({"ready": True, "worker": worker_id, "pid": os.getpid()})

    raise typer.Exit(run_worker(settings, ready=ready))


def controller(
    ctx: typer.Context,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="dispatcher, collector or reconciler; repeatable."),
    ] = None,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Run dispatcher, collector and reconciler.

    The services dispatch rollouts, record outcomes and expire lost attempts, until SIGTERM or
    Ctrl-C.
    """
    settings = settings_of(ctx)
    log_to_stderr(settings.log_level)
    from pipeline.controller import SERVICES, run_controller

    for name in only or ():
        if name not in SERVICES:
            raise InputError(
                f"There is no service {name!r}.", remedy=f"Known: {', '.join(SERVICES)}."
            )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if while_stdin:
        end_with_stdin()

    def ready() -> None:
        spare_garbage_collection()
        if as_json:
            print_json({"ready": True, "pid": os.getpid()})

    with open_deployment(settings, broker=True, create=True) as deployment:
        run_controller(
            deployment.engine,
            deployment.settings,
            stop=stop,
            only=tuple(only or SERVICES),
            ready=ready,
        )


def end_with_stdin() -> None:
    """End this process as on SIGTERM when its parent process has ended."""

    def wait() -> None:
        # Not through sys.stdin, because its lock would be held when the interpreter ends.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
