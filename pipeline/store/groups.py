"""Groups in the store: counted with every outcome, closed when all their rollouts are terminal.

Used by outcomes, rescores, group policies, cancellation and retry inside their transactions, which
have locked the rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.rollout import DropReason, GroupState, RolloutState

_LOCK = text("""
SELECT group_id, state, n_target, n_succeeded FROM groups
WHERE group_id = ANY(:ids) ORDER BY group_id FOR UPDATE
""")

_COUNT = text("""
UPDATE groups g SET n_succeeded = g.n_succeeded + d.s, n_failed = g.n_failed + d.f,
    n_cancelled = g.n_cancelled + d.c, n_cut = least(g.n_cut + d.cut, g.n_cancelled + d.c)
FROM unnest(CAST(:ids AS uuid[]), CAST(:succeeded AS integer[]), CAST(:failed AS integer[]),
            CAST(:cancelled AS integer[]), CAST(:cut AS integer[])) AS d (id, s, f, c, cut)
WHERE g.group_id = d.id
""")

_CLOSE = text("""
WITH full_groups AS (
    SELECT group_id FROM groups
    WHERE group_id = ANY(:ids) AND state = 'open'
      AND n_succeeded + n_failed + n_cancelled = n_rollouts
), scored AS (
    SELECT f.group_id, avg(r.reward) AS mean,
           -- Exactly 0 for equal rewards: the sums of stddev_pop are rounded.
           CASE WHEN min(r.reward) = max(r.reward) THEN 0 ELSE stddev_pop(r.reward) END AS std,
           coalesce(min(a.version_min), 0) AS min_version
    FROM full_groups f
    LEFT JOIN rollouts r ON r.group_id = f.group_id AND r.state = 'succeeded'
    LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.winner_attempt_no
    GROUP BY f.group_id
), closed AS (
    UPDATE groups g SET
        state = CASE WHEN n_succeeded >= n_min THEN 'ready' ELSE 'dropped' END,
        drop_reason = CASE WHEN n_succeeded >= n_min THEN NULL
                           WHEN CAST(:reason AS text) IS NOT NULL THEN :reason
                           WHEN n_cancelled > n_cut THEN 'cancelled' ELSE 'failed' END,
        ready_at = now(), reward_mean = s.mean, reward_std = s.std, min_version = s.min_version
    FROM scored s WHERE g.group_id = s.group_id
    RETURNING g.run_id, g.group_id, g.state, g.drop_reason
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, 'open', state, drop_reason FROM closed
)
SELECT count(*) FILTER (WHERE state = 'ready') AS ready,
       count(*) FILTER (WHERE state = 'dropped') AS dropped
FROM closed
""")

_REOPEN = """
WITH locked AS (
    SELECT group_id, state FROM groups g
    WHERE group_id = ANY(:ids) AND {condition}
    ORDER BY group_id FOR UPDATE
), reopened AS (
    UPDATE groups g SET state = 'open', ready_at = NULL, drop_reason = NULL,
        deadline_at = CASE WHEN :restarts THEN NULL ELSE g.deadline_at END,
        reward_mean = NULL, reward_std = NULL
    FROM locked l WHERE g.group_id = l.group_id AND l.state <> 'open'
    RETURNING g.run_id, g.group_id, l.state AS before
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, before, 'open', :reason FROM reopened
)
SELECT group_id FROM locked
"""


@dataclass(frozen=True, slots=True)
class LockedGroup:
    """A group that this transaction has locked."""

    group_id: UUID
    is_open: bool
    room: int  #: usable rollouts that it still takes


def lock_groups(connection: Connection, group_ids: Iterable[UUID]) -> dict[UUID, LockedGroup]:
    """Lock groups in order of their ids; their rollouts must be locked before."""
    ids = sorted(set(group_ids))
    if not ids:
        return {}
    return {
        row.group_id: LockedGroup(
            row.group_id, row.state == GroupState.OPEN, max(0, row.n_target - row.n_succeeded)
        )
        for row in connection.execute(_LOCK, {"ids": ids})
    }


def add_to_counters(
    connection: Connection,
    deltas: Mapping[UUID, Counter[RolloutState]],
    *,
    cut: Mapping[UUID, int] = MappingProxyType({}),
) -> list[UUID]:
    """Change the counters of groups, locking them; return their ids.

    Args:
        connection: An open transaction that holds the rollouts.
        deltas: By group, how many rollouts more (or fewer) are in a terminal state.
        cut: By group, how many of the cancelled ones were not needed or not in time.
    """
    if not deltas:
        return []
    ids = list(lock_groups(connection, deltas))
    connection.execute(
        _COUNT,
        {
            "ids": ids,
            "succeeded": [deltas[group][RolloutState.SUCCEEDED] for group in ids],
            "failed": [deltas[group][RolloutState.FAILED] for group in ids],
            "cancelled": [deltas[group][RolloutState.CANCELLED] for group in ids],
            "cut": [cut.get(group, 0) for group in ids],
        },
    )
    return ids


def close_groups(
    connection: Connection, group_ids: Sequence[UUID], *, reason: DropReason | None = None
) -> tuple[int, int]:
    """Close those groups whose rollouts are all terminal; return how many (ready, dropped).

    Reward statistics are computed here, once: the rollouts of a closed group do not change.

    Args:
        connection: An open transaction that holds the groups.
        group_ids: Candidates.
        reason: Drop reason of groups with too few usable rollouts; None: from their counters.
    """
    if not group_ids:
        return 0, 0
    row = connection.execute(_CLOSE, {"ids": list(group_ids), "reason": reason}).one()
    return row.ready, row.dropped


def reopen_groups(
    connection: Connection,
    group_ids: Iterable[UUID],
    condition: str,
    *,
    reason: str,
    restarts: bool = False,
) -> set[UUID]:
    """Lock those groups that a condition allows and open the closed ones; return all of them.

    Args:
        connection: An open transaction, which has locked the rollouts that it changes.
        group_ids: Candidates.
        condition: SQL about a group `g`.
        reason: Reason of the events.
        restarts: Whether the deadline begins anew, with the next dispatch.
    """
    values = {"ids": list(group_ids), "reason": reason, "restarts": restarts}
    return set(connection.execute(text(_REOPEN.format(condition=condition)), values).scalars())
