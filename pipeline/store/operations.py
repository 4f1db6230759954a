"""Operations on a run: cancel, pause, continue, retry its failed rollouts.

Used by the command line and the trainer client. Guarded set-based updates with their events and
group counters in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from pipeline.contract.rollout import RolloutState, RunState
from pipeline.store.engine import READY_CHANNEL, WORK_CHANNEL, notify, transact
from pipeline.store.groups import add_to_counters, close_groups, reopen_groups
from pipeline.store.journals import delete_journals
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.runs import Run, lock_run, require_not_cancelled, set_run_state

#: Rollouts cancelled in one transaction, whose locks other writers wait for.
CANCEL_CHUNK = 20_000

# Each half has a partial index; no index covers all three states.
_FIND_OPEN = text("""
SELECT rollout_id FROM rollouts WHERE run_id = :run_id AND state = 'queued'
UNION ALL
SELECT rollout_id FROM rollouts WHERE run_id = :run_id AND state IN ('dispatched', 'running')
LIMIT :most
""")

_FIND_OPEN_OF_GROUPS = text("""
SELECT rollout_id FROM rollouts
WHERE run_id = :run_id AND group_id = ANY(:groups) AND state IN ('queued', 'dispatched', 'running')
LIMIT :most
""")

_LOCK_OPEN = text("""
SELECT rollout_id, group_id FROM rollouts
WHERE rollout_id = ANY(:ids) AND state IN ('queued', 'dispatched', 'running')
ORDER BY rollout_id FOR UPDATE
""")

_CANCEL = text("""
WITH before AS (
    SELECT rollout_id, state FROM rollouts WHERE rollout_id = ANY(:ids)
), moved AS (
    UPDATE rollouts r SET state = 'cancelled', finished_at = now()
    FROM before b WHERE r.rollout_id = b.rollout_id
    RETURNING r.run_id, r.rollout_id, r.attempt_no, b.state AS before
), ended AS (
    UPDATE attempts a SET state = 'cancelled', ended_at = now()
    FROM moved m WHERE a.rollout_id = m.rollout_id AND a.state IN ('dispatched', 'running')
)
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state, reason)
SELECT run_id, 'rollout', rollout_id, nullif(attempt_no, 0), before, 'cancelled', 'operator'
FROM moved
""")

#: A leased or consumed group is not changed any more. A group with all its usable rollouts, or one
#: that was cut, does not need another try.
_MAY_REOPEN = (
    "g.state IN ('open', 'ready', 'dropped') AND g.n_succeeded < g.n_target AND g.n_cut = 0"
)

_COUNT_FAILED = """
SELECT count(*) AS total,
       count(*) FILTER (WHERE {may_reopen}) AS allowed
FROM rollouts r JOIN groups g USING (group_id)
LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.attempt_no
WHERE r.run_id = :run_id AND r.state = :state AND ({condition})
"""

_LOCK_FAILED = """
SELECT r.rollout_id, r.group_id FROM rollouts r
LEFT JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.attempt_no
WHERE r.run_id = :run_id AND r.state = :state AND ({condition})
ORDER BY r.rollout_id FOR UPDATE OF r
"""

_REQUEUE = text("""
WITH moved AS (
    UPDATE rollouts SET state = 'queued', attempts_used = 0, lost_count = 0, died_count = 0,
        unscored_no = NULL, not_before = now(), error_class = NULL, error_code = NULL,
        finished_at = NULL
    WHERE rollout_id = ANY(:ids) AND state = :state
    RETURNING run_id, rollout_id, attempt_no
)
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state, reason)
SELECT run_id, 'rollout', rollout_id, nullif(attempt_no, 0), :state, 'queued', 'retry' FROM moved
""")


_LOCK_WITH_DEADLINES = text("""
SELECT group_id FROM groups
WHERE run_id = :run_id AND state = 'open' AND deadline_at IS NOT NULL
ORDER BY group_id FOR UPDATE
""")

_SHIFT_DEADLINES = text("""
UPDATE groups SET deadline_at = deadline_at + (now() - stopped.at)
FROM (SELECT at FROM events WHERE entity_id = :run_id AND entity = 'run'
        AND from_state = 'active' ORDER BY seq DESC LIMIT 1) AS stopped
WHERE group_id = ANY(:ids)
""")


@dataclass(frozen=True, slots=True)
class RetryCount:
    """How many rollouts a retry queues again, and how many it must leave."""

    allowed: int
    refused: int


def begin_cancel(connection: Connection, run: Run, *, reason: str | None = None) -> None:
    """Mark a run as cancelled, so that no more of its rollouts are dispatched."""
    current = lock_run(connection, run)
    if current.state is not RunState.CANCELLED:
        set_run_state(connection, current, RunState.CANCELLED, reason=reason)


def cancel_all(engine: Engine, run: Run, *, groups: Sequence[UUID] | None = None) -> int:
    """Cancel the rollouts of a run, or of some groups, in several transactions; return how many."""
    cancelled = 0
    while n := transact(engine, cancel_rollouts, run, groups=groups):
        cancelled += n
    return cancelled


def cancel_rollouts(
    connection: Connection,
    run: Run,
    *,
    groups: Sequence[UUID] | None = None,
    most: int = CANCEL_CHUNK,
) -> int:
    """Cancel up to `most` rollouts that are not terminal, and their attempts; return how many.

    Without `groups` the rollouts are those of the whole run. `cancel_all` repeats the call until it
    returns 0. The collector asks the workers to stop when their next heartbeat arrives.
    """
    rows: Sequence[Any] = ()
    values: dict[str, Any] = {"run_id": run.run_id, "most": most}
    find = _FIND_OPEN
    if groups is not None:
        find, values["groups"] = _FIND_OPEN_OF_GROUPS, list(groups)
    while not rows:
        ids = list(connection.execute(find, values).scalars())
        if not ids:
            return 0
        # No row is left if all of these rollouts ended before they were locked.
        rows = connection.execute(_LOCK_OPEN, {"ids": ids}).all()
    connection.execute(_CANCEL, {"ids": [row.rollout_id for row in rows]})
    touched = add_to_counters(connection, _deltas(rows, RolloutState.CANCELLED, 1))
    close_groups(connection, touched)
    notify(connection, READY_CHANNEL)
    notify(connection, WORK_CHANNEL)
    return len(rows)


def pause_run(connection: Connection, run: Run, *, reason: str | None = None) -> bool:
    """Stop dispatching rollouts of a run; return whether it was active.

    Raises:
        NotAllowed: The run is cancelled.
    """
    current = lock_run(connection, run)
    if current.state is RunState.PAUSED:
        return False
    require_not_cancelled(current)
    set_run_state(connection, current, RunState.PAUSED, reason=reason)
    return True


def continue_run(connection: Connection, run: Run) -> bool:
    """Dispatch rollouts of a paused run again; return whether it was paused.

    The deadlines of its groups move by the time it was paused.

    Raises:
        NotAllowed: The run is cancelled.
    """
    groups = list(connection.execute(_LOCK_WITH_DEADLINES, {"run_id": run.run_id}).scalars())
    current = lock_run(connection, run)
    if current.state is RunState.ACTIVE:
        return False
    require_not_cancelled(current)
    connection.execute(_SHIFT_DEADLINES, {"run_id": run.run_id, "ids": groups})
    set_run_state(connection, current, RunState.ACTIVE)
    notify(connection, WORK_CHANNEL)
    return True


def count_retryable(
    connection: Connection, run: Run, where: RolloutFilter, *, state: RolloutState
) -> RetryCount:
    """Return the counts that `retry_rollouts` would return."""
    query = _COUNT_FAILED.format(may_reopen=_MAY_REOPEN, condition=where.sql)
    values = {"run_id": run.run_id, "state": str(state), **where.parameters}
    row = connection.execute(text(query), values).one()
    return RetryCount(row.allowed, row.total - row.allowed)


def retry_rollouts(
    connection: Connection, run: Run, where: RolloutFilter, *, state: RolloutState
) -> RetryCount:
    """Queue failed (or cancelled) rollouts again, with their whole budget of attempts.

    Their groups open again. A rollout stays as it is if its group is leased or consumed, or has all
    its usable rollouts. A cancelled run becomes active again.
    """
    query = text(_LOCK_FAILED.format(condition=where.sql))
    values = {"run_id": run.run_id, "state": str(state), **where.parameters}
    rows = connection.execute(query, values).all()
    groups = {row.group_id for row in rows}
    reopened = reopen_groups(connection, groups, _MAY_REOPEN, reason="retry", restarts=True)
    allowed = [row for row in rows if row.group_id in reopened]
    if allowed:
        ids = [row.rollout_id for row in allowed]
        # An operator asks for another try of the whole rollout.
        delete_journals(connection, ids)
        connection.execute(_REQUEUE, {"ids": ids, "state": str(state)})
        add_to_counters(connection, _deltas(allowed, state, -1))
        current = lock_run(connection, run)
        if current.state is RunState.CANCELLED:
            set_run_state(connection, current, RunState.ACTIVE, reason="retry")
        notify(connection, WORK_CHANNEL)
    return RetryCount(len(allowed), len(rows) - len(allowed))


def _deltas(
    rows: Sequence[Any], state: RolloutState, each: int
) -> dict[UUID, Counter[RolloutState]]:
    rollouts = Counter(row.group_id for row in rows)
    return {group_id: Counter({state: n * each}) for group_id, n in rollouts.items()}
