"""`rollout controller`: the services that dispatch rollouts and record their outcomes."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from pipeline.service import reduce_garbage_collection
from rollout.deployment import open_deployment, settings_of
from rollout.logs import log_to_stderr
from rollout.options import Json, WhileStdin
from rollout.output import print_json
from rollout.signals import end_with_stdin


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
        reduce_garbage_collection()
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
