"""The numbers of calls and failures of each tool, counted in the stored trajectories of a run.

`rollout errors` and the demo use it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.contract.activity import UNREADABLE_CALLS
from pipeline.queue.payloads import open_payloads
from pipeline.store.runs import Run
from pipeline.store.stored_bodies import read_bodies
from pipeline.trainer.bodies import try_read_record
from rollout.deployment import Deployment
from rollout.output import note
from workers.core.trajectory import LOST_CALLS


def errors_by_tool(deployment: Deployment, run: Run) -> list[dict[str, Any]]:
    """Return the numbers of calls and failures of each tool."""
    payloads = open_payloads(deployment.settings)
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    unreadable = 0
    after = None
    while page := deployment.transact(read_bodies, run, after=after):
        after = max(page)
        for row in page.values():
            record, error = try_read_record(row, payloads)
            unreadable += error is not None
            if record is None:
                continue
            for tool, figures in record.tools.items():
                calls[tool] += figures.get("calls", 0)
                failed[tool] += figures.get("errors", 0)
            if lost := record.metadata.get(LOST_CALLS, 0):
                calls[UNREADABLE_CALLS] += lost
                failed[UNREADABLE_CALLS] += lost
    if unreadable:
        note(f"{unreadable} trajectories are gone or damaged and were not counted.")
    return [{"tool": tool, "calls": n, "errors": failed[tool]} for tool, n in calls.most_common()]
