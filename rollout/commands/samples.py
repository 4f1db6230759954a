"""`rollout samples`: print a few rollouts of a run: question, final answer, reward, error."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.queue.payloads import open_payloads
from pipeline.store.rollout_filter import parse_filter
from pipeline.store.samples import read_samples
from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import print_json
from rollout.samples import print_sample, sample_document

#: The default condition: rollouts that have ended.
_ENDED = "status in ['succeeded', 'failed']"


def samples(
    ctx: typer.Context,
    run: RunName = "@last",
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR",
            help='Only matching rollouts: "reward == 0 and turns > 2". Fields: status, reward, '
            "stop_reason, label, error_class, error_code, message, phase, worker, group, index, "
            "attempts, lost, turns, tokens.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Rollouts to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Print a few rollouts: question, answer, reward, error.

    The order is that of the groups. `rollout show rollout LABEL --messages` prints the whole
    conversation of a rollout.
    """
    condition = parse_filter(where or _ENDED)
    with opened(ctx) as deployment:
        found = deployment.find_run(run)
        rows = deployment.transact(read_samples, found, condition, limit=limit)
        payloads = open_payloads(deployment.settings)
        documents = [sample_document(found, row, payloads) for row in rows]
    if as_json:
        print_json({"run": found.slug, "where": where, "samples": documents})
    elif not documents:
        print(f"Run {found.slug} has no such rollout.")
    else:
        for document in documents:
            print_sample(document)
