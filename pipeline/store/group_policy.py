"""Group policies of runs: surplus rollouts are cut, failed ones replaced, deadlines enforced.

Used by `outcomes.py` inside the ingest transaction; by the reconciler and by pulls for deadlines.
The ingest transaction has locked the rollouts first, then the groups. Must not: decide outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.rollout import (
    DropReason,
    RolloutState,
    afresh_rollout_id_of,
    group_id_of,
    label_of,
    rollout_id_of,
)
from pipeline.contract.run import RunConfig
from pipeline.store.engine import READY_CHANNEL, WORK_CHANNEL, notify
from pipeline.store.groups import add_to_counters, close_groups, lock_groups
from pipeline.store.runs import Run


@dataclass(slots=True)
class CutReport:
    """Rollouts that were cancelled because their group no longer needs them."""

    groups_ready: int = 0
    groups_dropped: int = 0
    cut: int = 0
    #: Labels of attempts that workers should stop.
    stopped: list[str] = field(default_factory=list[str])


_LOCK_WITH_SIBLINGS = text("""
SELECT rollout_id FROM rollouts
WHERE rollout_id = ANY(:ids)
   OR (state IN ('queued', 'dispatched', 'running') AND group_id = ANY(ARRAY(
        SELECT group_id FROM rollouts
        WHERE rollout_id = ANY(:ids) AND run_id = ANY(:run_ids))))
ORDER BY rollout_id FOR UPDATE
""")


def lock_with_siblings(
    connection: Connection, rollout_ids: Collection[UUID], run_ids: Collection[UUID]
) -> None:
    """Lock rollouts, and the open rollouts of their groups in runs that oversample.

    One statement locks all of them, in order of their ids. The siblings may be cancelled later in
    the transaction, and locking them only then could deadlock.
    """
    connection.execute(_LOCK_WITH_SIBLINGS, {"ids": list(rollout_ids), "run_ids": list(run_ids)})


_SATISFIED = text("""
SELECT group_id FROM groups
WHERE group_id = ANY(:ids) AND state = 'open' AND n_succeeded >= n_target
  AND n_succeeded + n_failed + n_cancelled < n_rollouts
""")


def cut_satisfied(connection: Connection, group_ids: Sequence[UUID]) -> CutReport:
    """Cancel the open rollouts of groups that have all the usable rollouts they need."""
    satisfied = list(connection.execute(_SATISFIED, {"ids": list(group_ids)}).scalars())
    return _cut(connection, satisfied, "surplus") if satisfied else CutReport()


# SKIP LOCKED: a replacement may have been added since the rollouts were locked. If another
# transaction holds it, the next outcome or the next look at deadlines cuts the group again.
_CUT = text("""
WITH picked AS (
    SELECT rollout_id, state FROM rollouts
    WHERE group_id = ANY(:ids) AND state IN ('queued', 'dispatched', 'running')
    FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE rollouts r SET state = 'cancelled', finished_at = now()
    FROM picked p WHERE r.rollout_id = p.rollout_id
    RETURNING r.run_id, r.group_id, r.group_no, r.rollout_id, r.rollout_index, r.attempt_no,
              p.state AS before
), ended AS (
    UPDATE attempts a SET state = 'cancelled', ended_at = now()
    FROM moved m WHERE a.rollout_id = m.rollout_id AND a.state IN ('dispatched', 'running')
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state, reason)
    SELECT run_id, 'rollout', rollout_id, nullif(attempt_no, 0), before, 'cancelled', :reason
    FROM moved
)
SELECT moved.group_id, moved.before, runs.slug, moved.group_no, moved.rollout_index,
       moved.attempt_no
FROM moved JOIN runs USING (run_id)
""")


def _cut(connection: Connection, group_ids: Sequence[UUID], reason: str) -> CutReport:
    rows = connection.execute(_CUT, {"ids": list(group_ids), "reason": reason}).all()
    per_group = Counter(row.group_id for row in rows)
    deltas = {group: Counter({RolloutState.CANCELLED: n}) for group, n in per_group.items()}
    add_to_counters(connection, deltas, cut=per_group)
    stopped = [
        label_of(row.slug, row.group_no, row.rollout_index, row.attempt_no)
        for row in rows
        if row.before != RolloutState.QUEUED
    ]
    return CutReport(cut=len(rows), stopped=stopped)


_OVERDUE = text("""
SELECT g.group_id FROM groups g JOIN runs USING (run_id)
WHERE g.state = 'open' AND g.deadline_at < now() AND runs.state = 'active'
ORDER BY g.deadline_at LIMIT :most
""")

_LOCK_OPEN = text("""
SELECT rollout_id FROM rollouts
WHERE group_id = ANY(:ids) AND state IN ('queued', 'dispatched', 'running')
ORDER BY rollout_id FOR UPDATE
""")


def end_overdue_groups(connection: Connection, *, most: int) -> CutReport:
    """Close up to `most` groups whose deadline has passed, as ready or dropped.

    Deadlines move while a run is paused (`runs.set_run_state`).
    """
    ids = list(connection.execute(_OVERDUE, {"most": most}).scalars())
    if not ids:
        return CutReport()
    connection.execute(_LOCK_OPEN, {"ids": ids})
    still_open = [
        group.group_id for group in lock_groups(connection, ids).values() if group.is_open
    ]
    report = _cut(connection, still_open, "deadline")
    report.groups_ready, report.groups_dropped = close_groups(
        connection, still_open, reason=DropReason.DEADLINE
    )
    notify(connection, READY_CHANNEL)
    return report


# The begun groups with rollouts under way and without an earlier deadline. The first dispatch of a
# group is that of a first attempt. The rows are locked in order of their ids, as in all statements.
_SET_LATE = text("""
WITH begun AS (
    SELECT g.group_id, min(a.dispatched_at) + make_interval(secs => :deadline_s) AS at
    FROM groups g JOIN rollouts r USING (group_id)
    JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = 1
    WHERE g.state = 'open' AND g.group_id IN (
        SELECT group_id FROM rollouts
        WHERE run_id = :run_id AND state IN ('dispatched', 'running'))
    GROUP BY g.group_id
), locked AS (
    SELECT g.group_id, begun.at FROM groups g JOIN begun USING (group_id)
    WHERE g.state = 'open' AND g.deadline_at IS DISTINCT FROM begun.at
      AND coalesce(g.deadline_at > begun.at, true)
    ORDER BY g.group_id FOR UPDATE OF g SKIP LOCKED
)
UPDATE groups g SET deadline_at = locked.at FROM locked WHERE g.group_id = locked.group_id
""")


def set_late_deadlines(connection: Connection, run: Run, deadline_s: float) -> None:
    """Give groups that are under way a deadline from their first dispatch, unless it is earlier.

    The reconciler closes them when it has passed.
    """
    connection.execute(_SET_LATE, {"run_id": run.run_id, "deadline_s": deadline_s})


_SHORT = text("""
SELECT run_id, group_id, prompt_id, group_no, n_target, n_rollouts, n_failed,
       n_target - (n_rollouts - n_failed - n_cancelled) AS missing
FROM groups
WHERE group_id = ANY(:ids) AND state = 'open' AND n_failed > 0
  AND n_rollouts - n_failed - n_cancelled < n_target
ORDER BY group_no
""")

_REPLACE = text("""
WITH wanted AS (
    SELECT * FROM unnest(
        CAST(:ids AS uuid[]), CAST(:groups AS uuid[]), CAST(:indexes AS integer[])
    ) AS w (rollout_id, group_id, rollout_index)
), grown AS (
    UPDATE groups g SET n_rollouts = g.n_rollouts + added.n
    FROM (SELECT group_id, count(*) AS n FROM wanted GROUP BY group_id) AS added
    WHERE g.group_id = added.group_id
)
INSERT INTO rollouts (rollout_id, group_id, run_id, group_no, rollout_index)
SELECT w.rollout_id, w.group_id, g.run_id, g.group_no, w.rollout_index
FROM wanted w JOIN groups g USING (group_id)
""")


class ShortGroup(NamedTuple):
    """A group that lacks usable rollouts."""

    run_id: UUID
    group_id: UUID
    prompt_id: UUID
    group_no: int
    n_target: int
    n_rollouts: int
    n_failed: int
    missing: int


def find_short_groups(
    connection: Connection, group_ids: Sequence[UUID], configs: Mapping[UUID, RunConfig]
) -> list[ShortGroup]:
    """Return those of the locked groups for which their run replaces rollouts, or fails."""
    if all(c.replacements == 0 and c.group_policy != "fail_run" for c in configs.values()):
        return []
    return [ShortGroup(*row) for row in connection.execute(_SHORT, {"ids": list(group_ids)})]


def replace_failed(
    connection: Connection, groups: Iterable[ShortGroup], configs: Mapping[UUID, RunConfig]
) -> list[ShortGroup]:
    """Add rollouts to short groups of locked runs, as far as the runs allow; return the others."""
    short: list[ShortGroup] = []
    for group in groups:
        config = configs[group.run_id]
        left = config.rollouts_per_prompt + config.replacements - group.n_rollouts
        if left < group.missing:
            # Another rollout would not complete the group either.
            short.append(group)
        else:
            _replace(connection, group)
    return short


def _replace(connection: Connection, group: ShortGroup) -> None:
    indexes: Iterable[int] = range(group.n_rollouts, group.n_rollouts + group.missing)
    # A prompt may have several groups; only in its first group do ids of rollouts follow from it.
    is_first = group.group_id == group_id_of(group.prompt_id)
    connection.execute(
        _REPLACE,
        {
            "ids": [
                rollout_id_of(group.prompt_id, index)
                if is_first
                else afresh_rollout_id_of(group.group_id, index)
                for index in indexes
            ],
            "groups": [group.group_id] * group.missing,
            "indexes": list(indexes),
        },
    )
    notify(connection, WORK_CHANNEL)
