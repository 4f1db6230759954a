"""`rollout gateway`: the gateway as a process of its own, for agents on other machines."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rollout.commands.workers import WhileStdin, end_with_stdin
from rollout.deployment import settings_of
from rollout.logs import log_to_stderr
from rollout.options import Json
from rollout.output import note, print_json


def gateway(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8700,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Answer model calls of agents on other machines.

    The calls are limited and tried again, but not recorded: they give no trajectory and no token
    ids. They carry keys that are signed with the deployment's broker.signing_key. The process runs
    until SIGTERM or Ctrl-C.
    """
    settings = settings_of(ctx, {})
    log_to_stderr(settings.log_level)
    if while_stdin:
        end_with_stdin()
    from workers.process.lone_gateway import run_gateway

    def ready(base_url: str) -> None:
        if as_json:
            print_json({"ready": True, "base_url": base_url, "pid": os.getpid()})
        else:
            note(f"The gateway answers at {base_url}.")

    run_gateway(settings, host, port, ready=ready)
