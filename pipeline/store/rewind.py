"""Going back to an earlier checkpoint: the later steps of a consumer give their groups back.

Used by `TrainerClient.resume`. Steps up to the checkpoint stay as they are, so the committed
history has no gap. Must not: touch the steps of other consumers.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from pipeline.contract.rollout import DropReason
from pipeline.contract.train_batch import Later, ResumeInfo
from pipeline.store.afresh import DroppedGroup, enqueue_afresh
from pipeline.store.engine import READY_CHANNEL, WORK_CHANNEL, notify
from pipeline.store.runs import Run, get_run
from pipeline.store.train_batches import list_steps

_LOCK_LATER = text("""
SELECT batch_id FROM train_batches
WHERE run_id = :run_id AND consumer = :consumer AND trainer_step > :after
  AND state IN ('leased', 'committed')
ORDER BY batch_id FOR UPDATE
""")

_GIVE_BACK = text("""
WITH given_up AS (
    UPDATE train_batches SET state = 'abandoned', committed_at = NULL, checkpoint_uri = NULL,
        reason = 'rewound to step ' || :after
    WHERE batch_id = ANY(:batches)
    RETURNING batch_id
), members AS (
    DELETE FROM train_batch_groups m USING given_up WHERE m.batch_id = given_up.batch_id
    RETURNING m.group_id
), locked AS (
    SELECT group_id, state FROM groups JOIN members USING (group_id)
    WHERE state IN ('leased', 'consumed') ORDER BY group_id FOR UPDATE OF groups
), freed AS (
    UPDATE groups g SET state = CASE WHEN :afresh THEN 'dropped' ELSE 'ready' END,
        drop_reason = CASE WHEN :afresh THEN :reason END
    FROM locked WHERE g.group_id = locked.group_id
    RETURNING g.run_id, g.group_id, g.prompt_id, g.group_no, g.state, locked.state AS before
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, before, state, :reason FROM freed
)
SELECT group_id, prompt_id, group_no FROM freed
""")


def resume_consumer(
    connection: Connection, run: Run, *, consumer: str, committed_step: int | None, later: Later
) -> ResumeInfo:
    """Return the next step after a checkpoint, once the later steps are given back as asked."""
    after = -1 if committed_step is None else committed_step
    returned = 0
    if later != "replay":
        returned = give_back_later_steps(
            connection, run, consumer=consumer, after=after, afresh=later == "afresh"
        )
    steps = list_steps(connection, run, consumer=consumer)
    policy = get_run(connection, run.slug).policy
    return ResumeInfo(
        committed_step,
        next_step=after + 1,
        replay=tuple(
            step for step, state in steps if step > after and state in ("leased", "committed")
        ),
        groups_returned=returned,
        policy_version=None if policy is None else policy.version,
    )


def give_back_later_steps(
    connection: Connection, run: Run, *, consumer: str, after: int, afresh: bool
) -> int:
    """Give back the groups of all steps after this one; return how many. Again it changes nothing.

    Args:
        connection: An open transaction.
        run: The run.
        consumer: Whose steps.
        after: The step of the checkpoint; -1 where there is none.
        afresh: Drop the groups (reason `rewound`) and enqueue their prompts afresh; False: the
            groups are ready again.
    """
    key = {"run_id": run.run_id, "consumer": consumer, "after": after}
    batches = list(connection.execute(_LOCK_LATER, key).scalars())
    if not batches:
        return 0
    values = {
        "batches": batches,
        "after": str(after),
        "afresh": afresh,
        "reason": str(DropReason.REWOUND),
    }
    freed = [DroppedGroup(*row) for row in connection.execute(_GIVE_BACK, values)]
    if afresh:
        enqueue_afresh(connection, run, freed)
    notify(connection, READY_CHANNEL)
    notify(connection, WORK_CHANNEL)
    return len(freed)
