"""Ready groups that a pull does not take: too old for its version, of equal rewards, or too small.

Used by `batch_leases.py` inside the transaction of a pull, which locks no group before these. The
first two kinds are dropped, and enqueued afresh where the batch spec asks for it. Groups with too
few usable rollouts stay, for a batch that takes them; the status counts them. Must not: lease.
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

IS_LARGE_ENOUGH = "n_succeeded >= CASE WHEN :full THEN n_target ELSE least(:min_size, n_target) END"

_TOO_SMALL = text(f"""
SELECT count(*) FROM groups
WHERE run_id = :run_id AND state = 'ready' AND NOT ({IS_LARGE_ENOUGH})
""")

_READY_TOKENS = text(f"""
SELECT coalesce(sum(completion_tokens), 0) FROM groups g
JOIN rollouts r ON r.group_id = g.group_id AND r.state = 'succeeded'
JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.winner_attempt_no
WHERE g.run_id = :run_id AND g.state = 'ready' AND {IS_LARGE_ENOUGH}
""")

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
    """Return the parameters of the conditions above; the stricter bound of staleness counts."""
    bounds = [b for b in (spec.max_staleness, run.config.max_staleness) if b is not None]
    oldest = None if policy_version is None or not bounds else policy_version - min(bounds)
    return {"oldest": oldest, "needs_variance": spec.filter_zero_variance, **_size(spec)}


def _size(spec: BatchSpec) -> dict[str, Any]:
    return {"full": spec.require_full_groups, "min_size": spec.min_group_size}


def count_too_small(connection: Connection, run: Run, spec: BatchSpec) -> int:
    """Return the ready groups that have too few usable rollouts for a batch."""
    return connection.execute(_TOO_SMALL, {"run_id": run.run_id, **_size(spec)}).scalar_one()


def count_ready_tokens(connection: Connection, run: Run, spec: BatchSpec) -> int:
    """Return the sampled tokens of the ready groups that are large enough for a batch."""
    values = {"run_id": run.run_id, **_size(spec)}
    return int(connection.execute(_READY_TOKENS, values).scalar_one())


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
