"""Runs that go wrong are paused, with the reason: too many errors, or a group that fell short.

Used by `outcomes.py` inside the ingest transaction, after rollouts and groups. Counts from when the
run was last started, so that `rollout continue` gives it a new chance. Must not: cancel anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.run import RunConfig
from pipeline.store.group_policy import ShortGroup

#: Ended rollouts below which an error rate says nothing.
MIN_JUDGED = 20

_JUDGE = text("""
UPDATE runs SET judged_finished = judged_finished + :finished,
    judged_failed = judged_failed + :failed
WHERE run_id = :run_id RETURNING judged_finished, judged_failed, state
""")

_TOP_ERROR = text("""
SELECT error_class FROM rollouts WHERE run_id = :run_id AND state = 'failed'
GROUP BY error_class ORDER BY count(*) DESC, error_class LIMIT 1
""")

_PAUSE = text("""
WITH paused AS (
    UPDATE runs SET state = 'paused', state_reason = :reason
    WHERE run_id = :run_id AND state = 'active' RETURNING run_id, slug
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'run', run_id, 'active', 'paused', :reason FROM paused
)
SELECT slug FROM paused
""")


def pause_failing_runs(
    connection: Connection,
    ended: Mapping[UUID, Counter[str]],
    configs: Mapping[UUID, RunConfig],
) -> list[str]:
    """Count what ended and pause runs whose error rate is above their bound.

    Args:
        connection: An open transaction.
        ended: By run, how many rollouts `succeeded` and `failed`.
        configs: By run.

    Returns:
        What to log: one sentence for each run that was paused.
    """
    sentences: list[str] = []
    for run_id in sorted(ended):
        bound = configs[run_id].max_error_rate
        count = ended[run_id]
        if bound is None or not count.total():
            continue
        values = {"run_id": run_id, "finished": count.total(), "failed": count["failed"]}
        judged = connection.execute(_JUDGE, values).one()
        finished, failed = judged.judged_finished, judged.judged_failed
        if judged.state != "active" or finished < MIN_JUDGED or failed <= bound * finished:
            continue
        top = connection.execute(_TOP_ERROR, {"run_id": run_id}).scalar_one_or_none()
        reason = (
            f"{failed} of {finished} rollouts failed ({failed / finished:.0%}, allowed are "
            f"{bound:.0%}), most often by {top}"
        )
        sentences += _pause(connection, run_id, reason)
    return sentences


def pause_short_runs(
    connection: Connection, short: Sequence[ShortGroup], configs: Mapping[UUID, RunConfig]
) -> list[str]:
    """Pause runs that go on with full groups only; return what to log."""
    sentences: list[str] = []
    for group in sorted(short, key=lambda group: (group.run_id, group.group_no)):
        if configs[group.run_id].group_policy != "fail_run":
            continue
        reason = (
            f"group g{group.group_no:06d} cannot have its {group.n_target} usable rollouts any "
            f"more ({group.n_failed} failed) and its policy is fail_run"
        )
        sentences += _pause(connection, group.run_id, reason)
    return sentences


def _pause(connection: Connection, run_id: UUID, reason: str) -> list[str]:
    slugs = connection.execute(_PAUSE, {"run_id": run_id, "reason": reason}).scalars()
    return [f"Run {slug} is paused because {reason}." for slug in slugs]
