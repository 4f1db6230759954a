"""`rollout demo`: the complete pipeline on a machine without servers, in a few seconds.

`play.py` imports most of the pipeline while the servers start.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rollout.demo.machine import demo_machine
from rollout.options import Json
from rollout.output import note


def demo(
    prompts: Annotated[int, typer.Option(min=1, max=5000, help="Arithmetic prompts.")] = 64,
    n: Annotated[int, typer.Option("-n", min=1, max=64, help="Rollouts of each prompt.")] = 4,
    as_json: Json = False,
) -> None:
    """Watch 64 prompts run, 4 rollouts each, with no model.

    A stand-in server answers instead of a model. The demo starts private servers, and removes
    everything at the end.
    """
    started = time.monotonic()
    with demo_machine() as machine:
        from rollout.demo.play import play

        play(machine.wait_ready(), prompts=prompts, n=n, as_json=as_json)
    note(f"The demo is removed. It took {time.monotonic() - started:.1f} s.")
