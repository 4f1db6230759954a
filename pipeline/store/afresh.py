"""Prompts of dropped groups that are enqueued afresh: each in a new group with new rollouts.

Used by pulls and rewinds inside their transactions, which hold the dropped groups. The old group
keeps its rollouts and rewards. Must not: decide which groups are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.rollout import RunState, afresh_group_id_of, afresh_rollout_id_of
from pipeline.store.engine import WORK_CHANNEL, notify
from pipeline.store.prompts import new_group_values
from pipeline.store.runs import Run, lock_run

# No other transaction knows the new rows, so they may be locked in any order.
_ENQUEUE = text("""
WITH given AS (
    SELECT id, prompt_id, next_group_no + CAST(number AS integer) - 1 AS group_no, before_no
    FROM runs, unnest(CAST(:ids AS uuid[]), CAST(:prompts AS uuid[]), CAST(:before AS integer[]))
        WITH ORDINALITY AS w (id, prompt_id, before_no, number)
    WHERE runs.run_id = :run_id
), numbered AS (
    UPDATE runs SET next_group_no = next_group_no + (SELECT count(*) FROM given)
    WHERE run_id = :run_id
), new_groups AS (
    INSERT INTO groups (group_id, run_id, prompt_id, group_no, n_target, n_rollouts, n_min,
                        priority)
    SELECT id, :run_id, prompt_id, group_no, :n, :n_rollouts, :n_min, :priority FROM given
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, to_state, reason)
    SELECT :run_id, 'group', id, 'open', 'afresh for g' || lpad(before_no::text, 6, '0') FROM given
)
INSERT INTO rollouts (rollout_id, group_id, run_id, group_no, rollout_index)
SELECT w.rollout_id, w.group_id, :run_id, given.group_no, w.rollout_index
FROM unnest(CAST(:rollouts AS uuid[]), CAST(:groups AS uuid[]), CAST(:indexes AS integer[]))
    AS w (rollout_id, group_id, rollout_index)
JOIN given ON given.id = w.group_id
""")


class DroppedGroup(NamedTuple):
    """A group that was dropped in this transaction."""

    group_id: UUID
    prompt_id: UUID
    group_no: int


def enqueue_afresh(connection: Connection, run: Run, dropped: Sequence[DroppedGroup]) -> int:
    """Enqueue the prompts of dropped groups again, in their order; return how many.

    A cancelled run gets no new groups.
    """
    if not dropped or lock_run(connection, run).state is RunState.CANCELLED:
        return 0
    dropped = sorted(dropped, key=lambda group: group.group_no)
    ids = [afresh_group_id_of(group.group_id) for group in dropped]
    indexes = range(run.config.rollouts_per_prompt)
    connection.execute(
        _ENQUEUE,
        new_group_values(run)
        | {
            "run_id": run.run_id,
            "ids": ids,
            "prompts": [group.prompt_id for group in dropped],
            "before": [group.group_no for group in dropped],
            "rollouts": [afresh_rollout_id_of(each, i) for each in ids for i in indexes],
            "groups": [each for each in ids for _ in indexes],
            "indexes": [i for _ in ids for i in indexes],
        },
    )
    notify(connection, WORK_CHANNEL)
    return len(ids)
