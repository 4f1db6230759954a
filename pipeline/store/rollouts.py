"""Queued rollouts in the store: claimed by a dispatcher, each with a new attempt and its lease.

Used by the dispatcher. Each function is a few set-based statements inside the caller's transaction.
Must not: publish.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.messages import AttemptKey
from pipeline.store.attempt_keys import key_arrays
from pipeline.store.runs import Run

#: An advisory lock; nothing else in the database uses this number.
_CLAIM_LOCK = 7_214_001
#: Above every group number.
_NO_END = 2**31 - 1


class ClaimedAttempt(NamedTuple):
    """A claimed rollout with its new attempt; the attempt is committed before it is published."""

    rollout_id: UUID
    group_id: UUID
    group_no: int
    rollout_index: int
    attempt_no: int
    n: int
    payload: dict[str, Any]
    lost_count: int = 0
    unscored_no: int | None = None  #: the earlier attempt whose trajectory this one scores


_CLAIM = """
WITH picked AS (
    SELECT rollout_id FROM rollouts
    WHERE run_id = :run_id AND state = 'queued' AND not_before <= now() AND group_no < :end {only}
    ORDER BY group_no, rollout_index LIMIT :most FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE rollouts r SET state = 'dispatched', attempt_no = r.attempt_no + 1
    FROM picked WHERE r.rollout_id = picked.rollout_id
    RETURNING r.rollout_id, r.group_id, r.group_no, r.rollout_index, r.attempt_no, r.lost_count,
        r.unscored_no
), new_attempts AS (
    INSERT INTO attempts (rollout_id, attempt_no, run_id, lease_until)
    SELECT rollout_id, attempt_no, :run_id, now() + make_interval(secs => :lease_s) FROM claimed
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state)
    SELECT :run_id, 'rollout', rollout_id, attempt_no, 'queued', 'dispatched' FROM claimed
)
SELECT c.rollout_id, c.group_id, c.group_no, c.rollout_index, c.attempt_no, g.n_rollouts, p.payload,
       c.lost_count, c.unscored_no
FROM claimed c JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
ORDER BY c.group_no, c.rollout_index
"""
_CLAIM_ANY = text(_CLAIM.format(only=""))
# The attempt number lets the statement use the index of rollouts that are queued again.
_CLAIM_UNSCORED = text(_CLAIM.format(only="AND attempt_no > 0 AND unscored_no IS NOT NULL"))

# The deadline counts from the first dispatch: a group may wait in the queue for any time.
_SET_DEADLINES = text("""
WITH locked AS (
    SELECT g.group_id, given.deadline_s
    FROM unnest(CAST(:ids AS uuid[]), CAST(:deadlines AS double precision[]))
        AS given (id, deadline_s)
    JOIN groups g ON g.group_id = given.id
    WHERE g.deadline_at IS NULL ORDER BY g.group_id FOR UPDATE OF g
)
UPDATE groups g SET deadline_at = now() + make_interval(secs => locked.deadline_s)
FROM locked WHERE g.group_id = locked.group_id
""")

_RENEW_UNSTARTED = text("""
WITH locked AS (
    SELECT a.rollout_id, a.attempt_no FROM attempts a
    JOIN unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS k (id, no)
      ON a.rollout_id = k.id AND a.attempt_no = k.no
    WHERE a.state = 'dispatched' AND a.worker_id IS NULL
    FOR UPDATE OF a SKIP LOCKED
)
UPDATE attempts a
SET dispatched_at = now(), lease_until = now() + make_interval(secs => :lease_s)
FROM locked WHERE a.rollout_id = locked.rollout_id AND a.attempt_no = locked.attempt_no
RETURNING a.rollout_id, a.attempt_no
""")

_WAIT_FOR_CLAIMS = text("SELECT pg_advisory_xact_lock(:key)")

_COUNT_IN_FLIGHT = text("""
SELECT run_id, count(*) FROM rollouts WHERE state IN ('dispatched', 'running') GROUP BY run_id
""")


def claim(
    connection: Connection,
    run: Run,
    *,
    most: int,
    lease_s: float,
    end: int | None = None,
    unscored: bool = False,
) -> list[ClaimedAttempt]:
    """Turn up to `most` queued rollouts into dispatched attempts, in order of their groups.

    The caller calls `set_deadlines` after its last claim.

    Args:
        connection: An open transaction; publish only after it is committed.
        run: The run to claim from.
        most: Upper bound.
        lease_s: Seconds until an attempt that does not start counts as lost.
        end: Number of the first group that is not claimed from; None: all groups are.
        unscored: Only rollouts whose trajectory waits for its reward.
    """
    end = _NO_END if end is None else end
    values = {"run_id": run.run_id, "most": most, "lease_s": lease_s, "end": end}
    rows = connection.execute(_CLAIM_UNSCORED if unscored else _CLAIM_ANY, values)
    return [ClaimedAttempt(*row) for row in rows]


def set_deadlines(
    connection: Connection, claims: Iterable[tuple[Run, list[ClaimedAttempt]]]
) -> None:
    """Begin the deadlines of groups that were claimed from for the first time.

    Args:
        connection: The transaction of all the claims: groups of several runs are locked together.
        claims: By run, what was claimed.
    """
    deadlines = {
        attempt.group_id: run.config.group_deadline_s
        for run, claimed in claims
        for attempt in claimed
        if run.config.group_deadline_s is not None
    }
    if deadlines:
        values = {"ids": list(deadlines), "deadlines": list(deadlines.values())}
        connection.execute(_SET_DEADLINES, values)


def renew_unstarted(
    connection: Connection, keys: Sequence[AttemptKey], *, lease_s: float
) -> set[AttemptKey]:
    """Begin the leases of dispatched attempts anew; return those that no worker has announced.

    Attempts that have ended or started stay as they are. An attempt that another transaction has
    locked is ending or starting.

    Args:
        connection: An open transaction; publish only after it is committed.
        keys: The attempts.
        lease_s: Seconds from now until an attempt that does not start counts as lost.
    """
    rows = connection.execute(_RENEW_UNSTARTED, key_arrays(keys) | {"lease_s": lease_s})
    return {(rollout_id, attempt_no) for rollout_id, attempt_no in rows}


def wait_to_claim(connection: Connection) -> None:
    """Wait until no other dispatcher is between its count and its claims.

    Two dispatchers that count at the same time would both fill the same slots.
    """
    connection.execute(_WAIT_FOR_CLAIMS, {"key": _CLAIM_LOCK})


def count_in_flight(connection: Connection) -> dict[UUID, int]:
    """Return the number of dispatched and running rollouts by run."""
    return {run_id: count for run_id, count in connection.execute(_COUNT_IN_FLIGHT)}
