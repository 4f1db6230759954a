"""`rollout why`: the reasons why a run's trainer waits."""

from __future__ import annotations

import typer

from pipeline.store.runs import find_run
from pipeline.store.status import run_stats
from rollout.deployment import opened
from rollout.options import Json, RunName
from rollout.output import print_json


def why(ctx: typer.Context, run: RunName = "@last", as_json: Json = False) -> None:
    """Say why a run's trainer waits.

    The first sentence has the numbers of groups; the others name what the run itself waits for.
    """
    with opened(ctx) as deployment:
        stats = deployment.transact(
            lambda connection: run_stats(connection, find_run(connection, run))
        )
    if as_json:
        print_json({"run": stats.run, "trainer": stats.why, "waits": list(stats.waits)})
        return
    for sentence in (stats.why, *stats.waits):
        print(sentence)
