"""Train batches that a consumer has leased: committed, given back, listed.

Used by the trainer client; `batch_leases.py` leases them. Each function runs in a short transaction
of its caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from pipeline.contract.errors import NotAllowed
from pipeline.contract.rollout import batch_id_of
from pipeline.store.batch_leases import E_TAKEN_OVER
from pipeline.store.runs import Run

# Keep this a separate statement: a take-over that it waits for is seen by `_COMMIT` only then.
_LOCK_STEPS = text("""
SELECT trainer_step, state FROM train_batches
WHERE run_id = :run_id AND consumer = :consumer AND trainer_step <= :step
  AND state IN ('leased', 'expired')
ORDER BY batch_id FOR UPDATE
""")

_COMMIT = text("""
WITH done AS (
    UPDATE train_batches SET state = 'committed', committed_at = now(),
        checkpoint_uri = coalesce(:checkpoint_uri, checkpoint_uri)
    WHERE run_id = :run_id AND consumer = :consumer AND trainer_step <= :step AND state = 'leased'
    RETURNING batch_id
), locked AS (
    SELECT group_id FROM groups JOIN train_batch_groups USING (group_id) JOIN done USING (batch_id)
    WHERE groups.state = 'leased' ORDER BY group_id FOR UPDATE OF groups
), consumed AS (
    UPDATE groups g SET state = 'consumed' FROM locked WHERE g.group_id = locked.group_id
    RETURNING g.run_id, g.group_id
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state)
    SELECT run_id, 'group', group_id, 'leased', 'consumed' FROM consumed
)
SELECT (SELECT count(*) FROM consumed) AS consumed,
       (SELECT count(*) FROM train_batch_groups JOIN done USING (batch_id)) AS leased
""")


def commit_batches(
    connection: Connection,
    run: Run,
    *,
    consumer: str,
    upto_step: int,
    checkpoint_uri: str | None = None,
) -> int:
    """Consume the groups of all leased steps up to this one; return how many there were.

    A second call changes nothing.

    Raises:
        NotAllowed: One of the steps was taken over by another consumer, or its groups are no longer
            leased. The caller's transaction must not be committed.
    """
    key = {"run_id": run.run_id, "consumer": consumer, "step": upto_step}
    # Locked first, so that no other consumer takes the groups over in the middle of the commit.
    steps = connection.execute(_LOCK_STEPS, key).all()
    lost = [row.trainer_step for row in steps if row.state == "expired"]
    if lost:
        raise _not_committed(
            min(lost),
            consumer,
            "Its lease ran out and another consumer took its groups: they would count twice.",
        )
    done = connection.execute(_COMMIT, key | {"checkpoint_uri": checkpoint_uri}).one()
    if done.consumed != done.leased:
        raise _not_committed(
            upto_step,
            consumer,
            f"Only {done.consumed} of its {done.leased} groups are still leased to it.",
        )
    return done.consumed


def _not_committed(step: int, consumer: str, why: str) -> NotAllowed:
    return NotAllowed(
        f"Step {step} of consumer {consumer} cannot be committed.",
        why=why,
        remedy="Go back to the checkpoint before that step.",
        code=E_TAKEN_OVER,
    )


_GIVE_BACK = text("""
WITH given_up AS (
    UPDATE train_batches SET state = 'abandoned', committed_at = NULL, checkpoint_uri = NULL,
        reason = :batch_reason
    WHERE batch_id = ANY(:batches) AND state = ANY(:states)
    RETURNING batch_id
), members AS (
    DELETE FROM train_batch_groups m USING given_up WHERE m.batch_id = given_up.batch_id
    RETURNING m.group_id
), locked AS (
    SELECT group_id, state FROM groups JOIN members USING (group_id)
    WHERE state IN ('leased', 'consumed') ORDER BY group_id FOR UPDATE OF groups
), freed AS (
    UPDATE groups g SET state = CASE WHEN :drops THEN 'dropped' ELSE 'ready' END,
        drop_reason = CASE WHEN :drops THEN :reason END
    FROM locked WHERE g.group_id = locked.group_id
    RETURNING g.run_id, g.group_id, g.prompt_id, g.group_no, g.state, locked.state AS before
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, before, state, :reason FROM freed
)
SELECT group_id, prompt_id, group_no FROM freed
""")


def abandon_batch(
    connection: Connection, run: Run, *, consumer: str, step: int, reason: str
) -> int:
    """Give back the groups of a step; return how many. A step that is not leased has none."""
    batch_id = batch_id_of(run.run_id, consumer, step)
    return len(give_back(connection, [batch_id], states=["leased"], reason=reason))


def give_back(
    connection: Connection,
    batch_ids: Sequence[UUID],
    *,
    states: Sequence[str],
    reason: str,
    batch_reason: str | None = None,
    drops: bool = False,
) -> Sequence[Row[Any]]:
    """Give back the groups of batches; return `(group_id, prompt_id, group_no)` of each.

    Args:
        connection: An open transaction, which has locked the batches if there are several.
        batch_ids: The batches.
        states: Only batches in these states.
        reason: The reason of the groups.
        batch_reason: The reason of the batches; None: that of the groups.
        drops: Whether the groups are dropped.
    """
    values = {
        "batches": list(batch_ids),
        "states": list(states),
        "reason": reason,
        "batch_reason": batch_reason or reason,
        "drops": drops,
    }
    return connection.execute(_GIVE_BACK, values).all()


_FORGET = text("""
WITH forgotten AS (
    UPDATE train_batches SET state = 'abandoned'
    WHERE run_id = :run_id AND consumer = :consumer AND trainer_step > :step AND state = 'expired'
    RETURNING batch_id
)
DELETE FROM train_batch_groups m USING forgotten WHERE m.batch_id = forgotten.batch_id
""")


def reset_expired_steps(connection: Connection, run: Run, *, consumer: str, after: int) -> None:
    """Free later steps whose groups another consumer took, so that they can lease other groups."""
    connection.execute(_FORGET, {"run_id": run.run_id, "consumer": consumer, "step": after})


_STEPS = text("""
SELECT trainer_step, state FROM train_batches
WHERE run_id = :run_id AND consumer = :consumer ORDER BY trainer_step
""")


def list_steps(connection: Connection, run: Run, *, consumer: str) -> list[tuple[int, str]]:
    """Return a consumer's steps with their states, in order."""
    rows = connection.execute(_STEPS, {"run_id": run.run_id, "consumer": consumer})
    return [(row.trainer_step, row.state) for row in rows]
