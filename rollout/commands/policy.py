"""`rollout offline-policy`: the stand-in server, which plays a model's part and is none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from rollout.commands.workers import WhileStdin, end_with_stdin
from rollout.options import Json
from workers.offline_policy.policy import OfflinePolicyOptions
from workers.offline_policy.server import run_server


def offline_policy(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    answer_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL with questions and gold answers.")
    ] = None,
    prompt_field: Annotated[str, typer.Option(metavar="F", help="In the key.")] = "question",
    answer_field: Annotated[str, typer.Option(metavar="F", help="In the key.")] = "answer",
    wrong: Annotated[
        float, typer.Option(metavar="RATE", min=0, max=1, help="Samples answered wrongly.")
    ] = 0.0,
    errors: Annotated[
        float, typer.Option(metavar="RATE", min=0, max=1, help="Calls that get a 429 or 500.")
    ] = 0.0,
    mishaps: Annotated[
        float, typer.Option(metavar="RATE", min=0, max=1, help="Samples that meet a mishap.")
    ] = 0.0,
    stall_s: Annotated[float, typer.Option(min=0, help="How late a stalled answer is.")] = 3.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="Of every answer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of all its choices.")] = 0,
    fd: Annotated[int | None, typer.Option(hidden=True, help="An inherited socket.")] = None,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Serve a stand-in for a model: it follows rules.

    The first line on stdout is a JSON object with its `base_url`, with and without `--json`.
    """
    del as_json
    if answer_key is not None and not answer_key.is_file():
        raise InputError(f"There is no answer key at {answer_key}.", remedy="Check --answer-key.")
    if while_stdin:
        end_with_stdin()
    run_server(
        OfflinePolicyOptions(
            host=host,
            port=port,
            fd=fd,
            answer_key=answer_key,
            prompt_field=prompt_field,
            answer_field=answer_field,
            wrong=wrong,
            errors=errors,
            mishaps=mishaps,
            stall_s=stall_s,
            latency_ms=latency_ms,
            seed=seed,
        )
    )
