"""Groups that are dropped after they were complete, and brought back by an operator.

Used by the trainer client for groups whose trajectories cannot be read, and by `rollout drop` and
`rollout dlq requeue`. Each function runs in a short transaction of its caller. Must not: read a
trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import NotAllowed
from pipeline.contract.messages import storable
from pipeline.contract.rollout import DropReason, GroupState
from pipeline.store.engine import READY_CHANNEL, notify
from pipeline.store.groups import close_groups, reopen_groups

_LOCK_UNREAD = text("""
SELECT batch_id FROM train_batches
WHERE batch_id = :batch_id AND state = 'leased' AND handed_out_at IS NULL
  AND manifest_digest = :manifest
FOR UPDATE
""")

_LOCK_GROUPS = text("SELECT FROM groups WHERE group_id = ANY(:ids) ORDER BY group_id FOR UPDATE")

_DROP = text("""
WITH members AS (
    DELETE FROM train_batch_groups WHERE batch_id = :batch_id AND group_id = ANY(:ids)
    RETURNING group_id
), dropped AS (
    UPDATE groups g SET state = 'dropped', drop_reason = 'unreadable'
    FROM members m WHERE g.group_id = m.group_id AND g.state = 'leased'
    RETURNING g.run_id, g.group_id, g.group_no
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, 'leased', 'dropped', 'unreadable' FROM dropped
)
INSERT INTO dead_letters (kind, run_id, label, reason)
SELECT 'group', run_id, slug || '-g' || lpad(group_no::text, 6, '0'), given.reason
FROM dropped JOIN runs USING (run_id)
JOIN unnest(CAST(:ids AS uuid[]), CAST(:reasons AS text[])) AS given (id, reason)
    ON given.id = dropped.group_id
""")


def drop_unreadable(
    connection: Connection, batch_id: UUID, manifest: str, reasons: Mapping[UUID, str]
) -> bool:
    """Drop groups of a leased batch, each with an event and a dead letter.

    The caller gives back the rest of the batch. Nothing is changed if the batch was handed out or
    leased anew since its groups were read: a trainer may already have them.

    Args:
        connection: An open transaction.
        batch_id: The batch.
        manifest: Digest of the groups that the caller read.
        reasons: By group, why its trajectories cannot be read.

    Returns:
        Whether the batch was still the one that was read.
    """
    values = {"batch_id": batch_id, "manifest": manifest}
    if connection.execute(_LOCK_UNREAD, values).one_or_none() is None:
        return False
    ids = sorted(reasons)
    connection.execute(_LOCK_GROUPS, {"ids": ids})
    connection.execute(
        _DROP,
        {"batch_id": batch_id, "ids": ids, "reasons": [storable(reasons[each]) for each in ids]},
    )
    # Trainers that wait learn that the run may have no more groups.
    notify(connection, READY_CHANNEL)
    return True


class GroupHolder(NamedTuple):
    """A group's state, and the step that holds it if it is leased."""

    state: GroupState
    consumer: str | None
    step: int | None


_HOLDER = text("""
SELECT g.state, b.consumer, b.trainer_step, b.batch_id FROM groups g
LEFT JOIN (train_batch_groups m JOIN train_batches b ON b.batch_id = m.batch_id
           AND b.state = 'leased') ON m.group_id = g.group_id AND g.state = 'leased'
WHERE g.group_id = :group_id
""")

# Batches are locked before groups, as by commit and take-over.
_LOCK_BATCH = text("SELECT FROM train_batches WHERE batch_id = :batch_id FOR UPDATE")

_DROP_ONE = text("""
WITH dropped AS (
    UPDATE groups SET state = 'dropped', drop_reason = :reason
    WHERE group_id = :group_id AND state = :state
    RETURNING run_id, group_id
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, :state, 'dropped', :reason FROM dropped
), left_batch AS (
    DELETE FROM train_batch_groups m USING dropped
    WHERE m.group_id = dropped.group_id AND m.batch_id = :batch_id
)
SELECT count(*) FROM dropped
""")

# From now on a replay returns the rest of the batch.
_REST = text("""
UPDATE train_batches b SET
    state = CASE WHEN m.digest IS NULL THEN 'abandoned' ELSE b.state END,
    reason = CASE WHEN m.digest IS NULL THEN 'its groups were dropped' ELSE b.reason END,
    manifest_digest = left(m.digest, 16)
FROM (SELECT encode(sha256(string_agg(uuid_send(group_id), '' ORDER BY position)), 'hex') AS digest
      FROM train_batch_groups WHERE batch_id = :batch_id) AS m
WHERE b.batch_id = :batch_id AND b.state = 'leased'
""")


def find_holder(connection: Connection, group_id: UUID) -> GroupHolder:
    """Return a group's state and holder."""
    row = connection.execute(_HOLDER, {"group_id": group_id}).one()
    return GroupHolder(GroupState(row.state), row.consumer, row.trainer_step)


def drop_group(connection: Connection, group_id: UUID) -> None:
    """Drop a group that is ready or leased; a leased one leaves its batch.

    Raises:
        NotAllowed: The group is open, consumed or dropped, or has just changed.
    """
    row = connection.execute(_HOLDER, {"group_id": group_id}).one()
    if row.state not in (GroupState.READY, GroupState.LEASED):
        raise NotAllowed(f"The group is {row.state}.", remedy=_REMEDIES[GroupState(row.state)])
    if row.batch_id is not None:
        connection.execute(_LOCK_BATCH, {"batch_id": row.batch_id})
    values = {
        "group_id": group_id,
        "batch_id": row.batch_id,
        "state": row.state,
        "reason": DropReason.OPERATOR,
    }
    if not connection.execute(_DROP_ONE, values).scalar_one():
        raise NotAllowed("The group has just changed.", remedy="Give the command again.")
    if row.batch_id is not None:
        connection.execute(_REST, {"batch_id": row.batch_id})
    notify(connection, READY_CHANNEL)


_REMEDIES = {
    GroupState.OPEN: "Its rollouts are not done; to end a whole run: rollout cancel",
    GroupState.CONSUMED: "The group was trained, so dropping it has no effect.",
    GroupState.DROPPED: "A dropped group stays dropped.",
}

_IS_UNREADABLE = "g.state = 'dropped' AND g.drop_reason = 'unreadable'"


def restore_group(connection: Connection, group_id: UUID) -> bool:
    """Make a group ready again that was unreadable; return whether it was such a group."""
    if not reopen_groups(connection, [group_id], _IS_UNREADABLE, reason="requeued"):
        return False
    close_groups(connection, [group_id])
    notify(connection, READY_CHANNEL)
    return True
