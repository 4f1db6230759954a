"""`rollout gateway`: the gateway as a process of its own, for agents on other machines."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rollout.deployment import settings_of, with_broker
from rollout.logs import log_to_stderr
from rollout.options import Json, WhileStdin
from rollout.output import note, print_json
from rollout.signals import end_with_stdin


def gateway(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8700,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Answer model calls of agents on other machines.

    The calls are limited, tried again, and recorded before they are answered: with their token ids
    they become the trajectory of the attempt. They carry keys that are signed with the deployment's
    broker.signing_key. The process runs until SIGTERM or Ctrl-C.
    """
    settings = settings_of(ctx)
    log_to_stderr(settings.log_level)
    if while_stdin:
        end_with_stdin()
    from workers.process.standalone_gateway import deployment_keys, run_gateway

    keys = deployment_keys(settings)
    settings = with_broker(settings)

    def ready(base_url: str) -> None:
        if as_json:
            print_json({"ready": True, "base_url": base_url, "pid": os.getpid()})
        else:
            note(f"The gateway answers at {base_url}.")

    run_gateway(settings, keys, host, port, ready=ready)
