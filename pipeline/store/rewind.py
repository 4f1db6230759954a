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
from pipeline.store.train_batches import give_back, list_steps

_LOCK_LATER = text("""
SELECT batch_id FROM train_batches
WHERE run_id = :run_id AND consumer = :consumer AND trainer_step > :after
  AND state IN ('leased', 'committed')
ORDER BY batch_id FOR UPDATE
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
    """Give back the groups of all steps after this one; return how many.

    A second call changes nothing.

    Args:
        connection: An open transaction.
        run: The run.
        consumer: The consumer of the steps.
        after: The step of the checkpoint; -1 where there is none.
        afresh: Drop the groups (reason `rewound`) and enqueue their prompts afresh; False: the
            groups are ready again.
    """
    key = {"run_id": run.run_id, "consumer": consumer, "after": after}
    batches = list(connection.execute(_LOCK_LATER, key).scalars())
    if not batches:
        return 0
    rows = give_back(
        connection,
        batches,
        states=["leased", "committed"],
        reason=str(DropReason.REWOUND),
        batch_reason=f"rewound to step {after}",
        drops=afresh,
    )
    if afresh:
        enqueue_afresh(connection, run, [DroppedGroup(*row) for row in rows])
    notify(connection, READY_CHANNEL)
    notify(connection, WORK_CHANNEL)
    return len(rows)
