"""Ready groups that a pull does not take: too old for the trainer's version, or of equal rewards.

Used by `batch_leases.py` inside the transaction of a pull, which locks no group before these. They
are dropped, and enqueued afresh where the batch spec asks for it. Must not: lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, text

from pipeline.contract.rollout import DropReason
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.afresh import DroppedGroup, enqueue_afresh
from pipeline.store.engine import READY_CHANNEL, notify
from pipeline.store.runs import Run

#: Groups dropped for one reason by one pull; the next pull drops the next ones.
_MOST = 1000

#: Version 0 is that of the weights with which a run begins. While none is published, it may as well
#: mean that no server reports its version.
_IS_KNOWN = "(min_version > 0 OR EXISTS (SELECT FROM policy_versions WHERE run_id = :run_id))"
IS_FRESH = f"""(CAST(:oldest AS integer) IS NULL OR min_version >= :oldest OR NOT {_IS_KNOWN})"""
#: A single reward has no variance, and is trained by methods that need none.
HAS_VARIANCE = "(NOT :needs_variance OR reward_std IS DISTINCT FROM 0 OR n_succeeded = 1)"

_DROP = """
WITH unfit AS (
    SELECT group_id FROM groups
    WHERE run_id = :run_id AND state = 'ready' AND {condition}
    LIMIT :most FOR UPDATE SKIP LOCKED
), dropped AS (
    UPDATE groups g SET state = 'dropped', drop_reason = :reason
    FROM unfit WHERE g.group_id = unfit.group_id
    RETURNING g.run_id, g.group_id, g.prompt_id, g.group_no
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, 'ready', 'dropped', :reason FROM dropped
)
SELECT group_id, prompt_id, group_no FROM dropped
"""
_DROP_STALE = text(_DROP.format(condition=f"min_version < :oldest AND {_IS_KNOWN}"))
_DROP_EQUAL = text(_DROP.format(condition="reward_std = 0 AND n_succeeded > 1"))

_COUNT_EQUAL = text("""
SELECT reward_mean, count(*) AS n FROM groups
WHERE run_id = :run_id AND drop_reason = 'zero_variance'
GROUP BY reward_mean ORDER BY reward_mean
""")


def count_equal_rewards(connection: Connection, run: Run) -> dict[str, int]:
    """Return how many groups were dropped for equal rewards, by the reward."""
    rows = connection.execute(_COUNT_EQUAL, {"run_id": run.run_id})
    return {f"{row.reward_mean:g}": row.n for row in rows}


def fitness(run: Run, spec: BatchSpec, policy_version: int | None) -> dict[str, Any]:
    """Return the parameters of `IS_FRESH` and `HAS_VARIANCE`; the stricter bound counts."""
    bounds = [b for b in (spec.max_staleness, run.config.max_staleness) if b is not None]
    oldest = None if policy_version is None or not bounds else policy_version - min(bounds)
    return {"oldest": oldest, "needs_variance": spec.filter_zero_variance}


def drop_unfit(
    connection: Connection, run: Run, spec: BatchSpec, values: Mapping[str, Any]
) -> None:
    """Drop the ready groups that are too old, or of equal rewards where the spec filters those.

    Args:
        connection: The transaction of the pull.
        run: The run.
        spec: The batch that is asked for.
        values: `fitness` of that batch, and the id of the run.
    """
    if values["oldest"] is not None:
        _drop(connection, run, spec, _DROP_STALE, values, DropReason.STALE)
    if values["needs_variance"]:
        _drop(connection, run, spec, _DROP_EQUAL, values, DropReason.ZERO_VARIANCE)


def _drop(
    connection: Connection,
    run: Run,
    spec: BatchSpec,
    statement: Any,
    values: Mapping[str, Any],
    reason: DropReason,
) -> None:
    rows = connection.execute(statement, {**values, "reason": str(reason), "most": _MOST})
    dropped = [DroppedGroup(*row) for row in rows]
    if not dropped:
        return
    if str(reason) in spec.requeue:
        enqueue_afresh(connection, run, dropped)
    # Trainers that wait learn that the run may have no more groups.
    notify(connection, READY_CHANNEL)
