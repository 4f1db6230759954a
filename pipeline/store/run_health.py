"""Runs with too many errors, or with a group that cannot be completed, are paused.

Used by `outcomes.py` inside the ingest transaction, after groups are locked; `status.py` asks
whether a pause was for failures. The counts begin when the run was last started, so that
a continued run is judged by new rollouts only. Must not: cancel anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.rollout import RunState
from pipeline.contract.run import RunConfig
from pipeline.store.group_policy import ShortGroup
from pipeline.store.working_time import advance_clock

#: An error rate is only judged from this number of ended rollouts on.
MIN_JUDGED = 20
#: Share of a run that must have failed without one success, where the run names no error rate.
FIRST_SHARE = 0.05

# A paused run keeps the counts that it was paused for. In a run without `max_error_rate`, counting
# ends with the first success, so that the row of a healthy run is not locked with every batch.
_LOCK = text("""
SELECT run_id, state FROM runs
WHERE run_id = ANY(:short)
   OR (run_id = ANY(:ended) AND state = 'active'
       AND (run_id = ANY(:bounded) OR judged_finished = judged_failed))
ORDER BY run_id FOR NO KEY UPDATE
""")

_JUDGE = text("""
UPDATE runs SET judged_finished = judged_finished + :finished,
    judged_failed = judged_failed + :failed
WHERE run_id = :run_id AND state = 'active' AND (:is_bounded OR judged_finished = judged_failed)
RETURNING judged_finished, judged_failed, next_group_no
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


def is_failing(config: RunConfig, *, finished: int, failed: int, prompts: int) -> bool:
    """Say whether a run fails too often to go on; reads no database.

    Above `max_error_rate`, from 20 ended rollouts on. Where the run names none: when all of the
    first 20 ended rollouts have failed, or all of the first 5 % in a run of more than 400.

    Args:
        config: The run's.
        finished: Rollouts that succeeded or failed since the run was last started.
        failed: Of these, the failed ones.
        prompts: Prompts that the run has so far; more may be announced.
    """
    if config.max_error_rate is not None:
        return finished >= MIN_JUDGED and failed > config.max_error_rate * finished
    announced = prompts * config.rollouts_per_prompt
    return failed == finished >= max(MIN_JUDGED, FIRST_SHARE * announced)


def lock_judged_runs(
    connection: Connection,
    short: Iterable[UUID],
    ended: Iterable[UUID],
    configs: Mapping[UUID, RunConfig],
) -> dict[UUID, RunState]:
    """Lock the runs of short groups and those whose errors are counted; return their states.

    Args:
        connection: An open transaction that has taken its other locks.
        short: Runs of groups that lack usable rollouts.
        ended: Runs of which rollouts succeeded or failed.
        configs: By run.
    """
    bounded = [run_id for run_id, config in configs.items() if config.max_error_rate is not None]
    values = {"short": list(short), "ended": list(ended), "bounded": bounded}
    return {row.run_id: RunState(row.state) for row in connection.execute(_LOCK, values)}


def pause_failing_runs(
    connection: Connection,
    ended: Mapping[UUID, Counter[str]],
    configs: Mapping[UUID, RunConfig],
) -> list[str]:
    """Count ended rollouts of locked runs and pause the runs that fail too often.

    Args:
        connection: An open transaction.
        ended: By run, how many rollouts `succeeded` and `failed`.
        configs: By run.

    Returns:
        One sentence to log for each run that was paused.
    """
    sentences: list[str] = []
    for run_id in sorted(ended):
        config, count = configs[run_id], ended[run_id]
        values = {"run_id": run_id, "finished": count.total(), "failed": count["failed"]}
        is_bounded = config.max_error_rate is not None
        judged = connection.execute(_JUDGE, values | {"is_bounded": is_bounded}).one_or_none()
        if judged is None:
            continue
        finished, failed = judged.judged_finished, judged.judged_failed
        if not is_failing(config, finished=finished, failed=failed, prompts=judged.next_group_no):
            continue
        top = connection.execute(_TOP_ERROR, {"run_id": run_id}).scalar_one_or_none()
        share = _failed_share(finished, failed, config.max_error_rate)
        sentences += _pause(connection, run_id, f"{share}, most often by {top}")
    return sentences


def pause_short_runs(
    connection: Connection, short: Sequence[ShortGroup], configs: Mapping[UUID, RunConfig]
) -> list[str]:
    """Pause runs whose policy is `fail_run`; return sentences to log."""
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


def _failed_share(finished: int, failed: int, bound: float | None) -> str:
    if bound is None:
        return f"all of the first {finished} rollouts failed"
    allowed = f"{failed / finished:.0%}, allowed are {bound:.0%}"
    return f"{failed} of {finished} rollouts failed ({allowed})"


def _pause(connection: Connection, run_id: UUID, reason: str) -> list[str]:
    advance_clock(connection, run_id)
    slugs = connection.execute(_PAUSE, {"run_id": run_id, "reason": reason}).scalars()
    return [f"Run {slug} is paused because {reason}." for slug in slugs]
