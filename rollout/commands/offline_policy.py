"""`rollout offline-policy`: the stand-in server, which answers like a model from rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.contract.errors import InputError
from rollout.options import Json, WhileStdin
from rollout.signals import end_with_stdin
from workers.offline_policy.policy import OfflinePolicyOptions
from workers.offline_policy.server import run_server


def offline_policy(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    answer_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL with questions and gold answers.")
    ] = None,
    prompt_field: Annotated[
        str, typer.Option(metavar="FIELD", help="Question in the answer key.")
    ] = "question",
    answer_field: Annotated[
        str, typer.Option(metavar="FIELD", help="Answer in the answer key.")
    ] = "answer",
    wrong: Annotated[
        float, typer.Option(metavar="RATE", min=0, max=1, help="Share of wrong answers.")
    ] = 0.0,
    errors: Annotated[
        float, typer.Option(metavar="RATE", min=0, max=1, help="Share of calls with a 429 or 500.")
    ] = 0.0,
    mishaps: Annotated[
        float,
        typer.Option(
            metavar="RATE", min=0, max=1, help="Share of samples with one injected failure."
        ),
    ] = 0.0,
    stall_s: Annotated[float, typer.Option(min=0, help="Delay of a stalled answer.")] = 3.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="Latency of every answer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    fd: Annotated[int | None, typer.Option(hidden=True, help="An inherited socket.")] = None,
    as_json: Json = False,
    while_stdin: WhileStdin = False,
) -> None:
    """Serve a stand-in for a model, which answers from rules.

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
