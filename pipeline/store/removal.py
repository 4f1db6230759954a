"""The removal of a run: all its rows are deleted in batches, and its name is free again.

Used by `rollout rm`. Referring rows are deleted before the rows they refer to, so that an
interrupted removal can be repeated. Must not: delete objects of the payload store.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from pipeline.contract.errors import NotAllowed
from pipeline.contract.rollout import RunState, run_id_of
from pipeline.store.engine import READY_CHANNEL, WORK_CHANNEL, notify
from pipeline.store.run_counters import stop_folding
from pipeline.store.runs import Run, lock_run, set_run_state
from pipeline.store.status import run_state

E_IN_USE = "E142"

#: Groups whose rows are deleted in one transaction.
GROUPS_AT_ONCE = 500

_REASON = "it is being removed"

_USES = text("""
SELECT (SELECT count(*) FROM rollouts
        WHERE run_id = :run_id AND state IN ('dispatched', 'running')) AS in_flight,
       (SELECT consumer || ' until ' || to_char(lease_until AT TIME ZONE 'UTC', 'HH24:MI:SS')
            || ' UTC'
        FROM train_batches WHERE run_id = :run_id AND state = 'leased' AND lease_until > now()
        ORDER BY lease_until DESC LIMIT 1) AS lease
""")

_LOCK = text("""
WITH picked AS MATERIALIZED (
    SELECT group_id FROM groups WHERE run_id = :run_id ORDER BY group_no LIMIT :most
)
SELECT rollout_id FROM rollouts JOIN picked USING (group_id) ORDER BY rollout_id
FOR UPDATE OF rollouts
""")

_LOCK_GROUPS = text("""
SELECT group_id FROM groups WHERE group_id = ANY(ARRAY(
    SELECT group_id FROM groups WHERE run_id = :run_id ORDER BY group_no LIMIT :most
)) ORDER BY group_id FOR UPDATE
""")

_DELETE_GROUPS = text("""
WITH picked AS MATERIALIZED (
    SELECT group_id, prompt_id FROM groups WHERE run_id = :run_id ORDER BY group_no LIMIT :most
), ids AS MATERIALIZED (
    SELECT rollout_id FROM rollouts JOIN picked USING (group_id)
), d_rewards AS (
    DELETE FROM rewards t USING ids WHERE t.rollout_id = ids.rollout_id RETURNING 1
), d_trajectories AS (
    DELETE FROM trajectories t USING ids WHERE t.rollout_id = ids.rollout_id RETURNING 1
), d_journals AS (
    DELETE FROM journals t USING ids WHERE t.rollout_id = ids.rollout_id RETURNING 1
), d_attempts AS (
    DELETE FROM attempts t USING ids WHERE t.rollout_id = ids.rollout_id RETURNING 1
), d_events AS (
    DELETE FROM events t USING (SELECT rollout_id AS id FROM ids UNION ALL
                                SELECT group_id FROM picked) AS of
    WHERE t.entity_id = of.id RETURNING 1
), d_rollouts AS (
    DELETE FROM rollouts t USING ids WHERE t.rollout_id = ids.rollout_id RETURNING 1
), d_groups AS (
    DELETE FROM groups t USING picked WHERE t.group_id = picked.group_id RETURNING 1
), d_prompts AS (
    DELETE FROM prompts t USING picked WHERE t.prompt_id = picked.prompt_id RETURNING 1
)
SELECT (SELECT count(*) FROM d_prompts) AS prompts, (SELECT count(*) FROM d_groups) AS groups,
       (SELECT count(*) FROM d_rollouts) AS rollouts, (SELECT count(*) FROM d_attempts) AS attempts,
       (SELECT count(*) FROM d_trajectories) AS trajectories,
       (SELECT count(*) FROM d_journals) AS journals,
       (SELECT count(*) FROM d_rewards) AS rewards, (SELECT count(*) FROM d_events) AS events
""")

_LOCK_LETTERS = text("""
SELECT FROM dead_letters WHERE run_id = :run_id ORDER BY dead_letter_id FOR UPDATE
""")

_LOCK_BATCHES = text("""
SELECT FROM train_batches WHERE run_id = :run_id ORDER BY batch_id FOR UPDATE
""")

# Foreign keys delete `policy_versions` and the members of train batches (ADR 0013). Counters are
# deleted last, because the deletions before add rows to them; they are not reported.
_DELETE_RUN = text("""
WITH d_letters AS (
    DELETE FROM dead_letters WHERE run_id = :run_id RETURNING 1
), d_events AS (
    DELETE FROM events WHERE entity_id = :run_id AND to_state <> 'removed' RETURNING 1
), d_prompts AS (
    DELETE FROM prompts WHERE run_id = :run_id RETURNING 1
), d_rollouts AS (
    DELETE FROM rollout_tallies WHERE run_id = :run_id
), d_groups AS (
    DELETE FROM group_tallies WHERE run_id = :run_id
), d_reward_tallies AS (
    DELETE FROM reward_tallies WHERE run_id = :run_id
), d_scores AS (
    DELETE FROM score_tallies WHERE run_id = :run_id
), d_attempts AS (
    DELETE FROM attempt_tallies WHERE run_id = :run_id
), d_rescores AS (
    DELETE FROM rescores WHERE run_id = :run_id RETURNING 1
), d_sessions AS (
    DELETE FROM remote_sessions WHERE run_id = :run_id RETURNING 1
), d_batches AS (
    DELETE FROM train_batches WHERE run_id = :run_id RETURNING 1
), d_run AS (
    DELETE FROM runs WHERE run_id = :run_id RETURNING 1
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state)
    SELECT :name_id, 'run', :name_id, :state, 'removed' FROM d_run
)
SELECT (SELECT count(*) FROM d_run) AS runs, (SELECT count(*) FROM d_batches) AS train_batches,
       (SELECT count(*) FROM d_letters) AS dead_letters,
       (SELECT count(*) FROM d_rescores) AS rescores,
       (SELECT count(*) FROM d_sessions) AS remote_sessions,
       (SELECT count(*) FROM d_prompts) AS prompts, (SELECT count(*) FROM d_events) AS events
""")

_SINCE_CANCEL = text("""
SELECT extract(epoch FROM now() - max(ended_at)) FROM attempts a
JOIN rollouts r USING (rollout_id, attempt_no)
WHERE r.run_id = :run_id AND r.state = 'cancelled' AND a.state = 'cancelled'
  AND a.worker_id IS NOT NULL
""")


def require_removable(connection: Connection, run: Run) -> None:
    """Check that no process works on a run.

    Raises:
        NotAllowed: The run is active or has rollouts in flight, or a trainer leases its groups.
    """
    state = run_state(connection, run)
    if state is RunState.ACTIVE:
        raise NotAllowed(
            f"Run {run.slug} is active.",
            why="Only a finished, paused or cancelled run can be removed.",
            remedy=f"End it first: rollout cancel {run.slug}",
            code=E_IN_USE,
        )
    uses = connection.execute(_USES, {"run_id": run.run_id}).one()
    if uses.in_flight:
        raise NotAllowed(
            f"Run {run.slug} has {uses.in_flight} rollouts in flight.",
            remedy=f"Wait for them, or end the run first: rollout cancel {run.slug}",
            code=E_IN_USE,
        )
    if uses.lease and state is not RunState.CANCELLED:
        raise NotAllowed(
            f"Consumer {uses.lease} holds groups of run {run.slug}.",
            why="Its trainer may be training with them.",
            remedy=f"Commit its step, wait for the end of the lease, or: rollout cancel {run.slug}",
            code=E_IN_USE,
        )


def begin_removal(connection: Connection, run: Run) -> None:
    """Check a run once more and cancel it, so that no process works on it from now on.

    Raises:
        NotAllowed: As `require_removable`.
    """
    current = lock_run(connection, run)
    require_removable(connection, current)
    set_run_state(connection, current, RunState.CANCELLED, reason=_REASON)
    notify(connection, WORK_CHANNEL)


def remove_groups(
    connection: Connection, run: Run, *, most: int = GROUPS_AT_ONCE
) -> dict[str, int]:
    """Delete up to `most` groups with all their rows; return how many rows of each table.

    The caller repeats the call, each time in a transaction of its own, until `groups` is 0.
    """
    values = {"run_id": run.run_id, "most": most}
    connection.execute(_LOCK, values)
    connection.execute(_LOCK_GROUPS, values)
    return _counts(connection.execute(_DELETE_GROUPS, values).one())


def remove_rest(connection: Connection, run: Run) -> dict[str, int]:
    """Delete the remaining rows of a run without groups, and record the removal of its name."""
    values = {"run_id": run.run_id, "name_id": run_id_of(run.slug), "state": str(run.state)}
    stop_folding(connection)
    connection.execute(_LOCK_LETTERS, values)
    connection.execute(_LOCK_BATCHES, values)
    deleted = _counts(connection.execute(_DELETE_RUN, values).one())
    notify(connection, READY_CHANNEL)
    return deleted


def seconds_since_cancel(connection: Connection, run: Run) -> float | None:
    """Return the seconds since an attempt in a worker was cancelled last; None: there is none."""
    found = connection.execute(_SINCE_CANCEL, {"run_id": run.run_id}).scalar_one()
    return None if found is None else float(found)


def _counts(row: Any) -> dict[str, int]:
    return {name: int(n) for name, n in row._mapping.items()}
