"""Rollouts in the store: claimed, kept alive by heartbeats, found when their lease ran out.

Used by dispatcher, collector and reconciler. Each function is a few set-based statements inside
the caller's transaction. Locks are taken in the order rollouts, then groups, both by id.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from pipeline.contract.messages import Heartbeat
from pipeline.contract.rollout import label_of
from pipeline.store.activity import stored_activity
from pipeline.store.runs import Run

#: Any number that nothing else in the database locks by.
_CLAIM_LOCK = 7_214_001


@dataclass(frozen=True, slots=True)
class ClaimedAttempt:
    """A rollout that was claimed: its new attempt is committed before it is published."""

    rollout_id: UUID
    group_id: UUID
    group_no: int
    rollout_index: int
    attempt_no: int
    n: int
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SilentAttempt:
    """An attempt nobody has heard of for longer than its lease."""

    run_id: UUID
    group_id: UUID
    rollout_id: UUID
    attempt_no: int
    label: str
    worker_id: str | None
    lost_count: int
    worker_died: bool  #: whether the worker that held it, or may have, ended without a word
    dispatched_at: datetime
    started_at: datetime | None = None  #: when a worker first named it as running
    worker_seen_at: datetime | None = None  #: when its worker was last heard


@dataclass(frozen=True, slots=True)
class Suspect:
    """Who was lost before, and when it may have been in a worker that did not name it.

    A request that its worker could not acknowledge any more goes to the next one, so an attempt may
    have been in several.
    """

    rollout_id: UUID
    lost_count: int
    worker_id: str | None
    dispatched_at: datetime
    started_at: datetime | None
    gone_at: datetime | None = None  #: None: it is still in flight


_CLAIM = text("""
WITH picked AS (
    SELECT rollout_id FROM rollouts
    WHERE run_id = :run_id AND state = 'queued' AND not_before <= now()
    ORDER BY group_no, rollout_index LIMIT :most FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE rollouts r SET state = 'dispatched', attempt_no = r.attempt_no + 1
    FROM picked WHERE r.rollout_id = picked.rollout_id
    RETURNING r.rollout_id, r.group_id, r.group_no, r.rollout_index, r.attempt_no
), new_attempts AS (
    INSERT INTO attempts (rollout_id, attempt_no, run_id, lease_until)
    SELECT rollout_id, attempt_no, :run_id, now() + make_interval(secs => :lease_s) FROM claimed
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state)
    SELECT :run_id, 'rollout', rollout_id, attempt_no, 'queued', 'dispatched' FROM claimed
)
SELECT c.rollout_id, c.group_id, c.group_no, c.rollout_index, c.attempt_no, g.n_rollouts, p.payload
FROM claimed c JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
ORDER BY c.group_no, c.rollout_index
""")

# From the first dispatch: time in the queue is not held against a group.
_SET_DEADLINES = text("""
WITH locked AS (
    SELECT group_id FROM groups
    WHERE group_id = ANY(:ids) AND deadline_at IS NULL ORDER BY group_id FOR UPDATE
)
UPDATE groups g SET deadline_at = now() + make_interval(secs => :deadline_s)
FROM locked WHERE g.group_id = locked.group_id
""")


def claim(connection: Connection, run: Run, *, most: int, lease_s: float) -> list[ClaimedAttempt]:
    """Turn up to `most` queued rollouts into dispatched attempts, in order of their groups.

    Args:
        connection: An open transaction; publish only after it is committed.
        run: The run to claim from.
        most: Upper bound.
        lease_s: Seconds until an attempt that never starts counts as lost.
    """
    rows = connection.execute(_CLAIM, {"run_id": run.run_id, "most": most, "lease_s": lease_s})
    claimed = [ClaimedAttempt(*row) for row in rows]
    if claimed and run.config.group_deadline_s is not None:
        groups = {attempt.group_id for attempt in claimed}
        values = {"ids": list(groups), "deadline_s": run.config.group_deadline_s}
        connection.execute(_SET_DEADLINES, values)
    return claimed


def wait_to_claim(connection: Connection) -> None:
    """Wait until no other dispatcher is between its count and its claims.

    Two that count at the same time would both fill the same room.
    """
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CLAIM_LOCK})


def count_in_flight(connection: Connection) -> dict[UUID, int]:
    """Return the number of dispatched and running rollouts by run."""
    rows = connection.execute(
        text(
            "SELECT run_id, count(*) FROM rollouts"
            " WHERE state IN ('dispatched', 'running') GROUP BY run_id"
        )
    )
    return {run_id: count for run_id, count in rows}


_START = text("""
WITH beats AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS b (id, no)
), locked AS (
    SELECT r.rollout_id FROM rollouts r JOIN beats b ON r.rollout_id = b.id
    WHERE r.state = 'dispatched' AND r.attempt_no = b.no
    ORDER BY r.rollout_id FOR UPDATE OF r
), started AS (
    UPDATE rollouts r SET state = 'running' FROM locked WHERE r.rollout_id = locked.rollout_id
    RETURNING r.rollout_id, r.run_id, r.attempt_no
)
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state)
SELECT run_id, 'rollout', rollout_id, attempt_no, 'dispatched', 'running' FROM started
""")

# A lease is renewed when a third of it is gone: at most every second heartbeat costs a write.
_RENEW = text("""
UPDATE attempts a SET
    state = CASE WHEN b.phase = 'reserved' THEN a.state ELSE 'running' END,
    worker_id = :worker_id, phase = b.phase, step = b.step,
    started_at = CASE WHEN b.phase = 'reserved' THEN NULL ELSE coalesce(a.started_at, now()) END,
    lease_until = now() + make_interval(secs => :lease_s)
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:phases AS text[]),
            CAST(:steps AS integer[])) AS b (id, no, phase, step)
WHERE a.rollout_id = b.id AND a.attempt_no = b.no AND a.state IN ('dispatched', 'running')
  AND (a.worker_id IS DISTINCT FROM :worker_id OR a.phase IS DISTINCT FROM b.phase
       OR a.lease_until < now() + make_interval(secs => :lease_s * 2 / 3))
""")

_FENCED = text("""
SELECT runs.slug, r.group_no, r.rollout_index, b.no
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS b (id, no)
JOIN attempts a ON a.rollout_id = b.id AND a.attempt_no = b.no
JOIN rollouts r ON r.rollout_id = b.id JOIN runs ON runs.run_id = r.run_id
WHERE a.state NOT IN ('dispatched', 'running')
""")

_SEEN = text("""
INSERT INTO processes
    (process_id, kind, capacity, in_flight, loop_lag_ms, stopping, takes, activity)
VALUES (:worker_id, 'worker', :capacity, :in_flight, :loop_lag_ms, :stopping, :takes, :activity)
ON CONFLICT (process_id) DO UPDATE SET last_seen_at = now(), capacity = :capacity,
    in_flight = :in_flight, loop_lag_ms = :loop_lag_ms, stopping = :stopping, takes = :takes,
    activity = coalesce(nullif(excluded.activity, '{}'), processes.activity)
""").bindparams(bindparam("takes", type_=JSONB), bindparam("activity", type_=JSONB))


def keep_alive(connection: Connection, beat: Heartbeat, *, lease_s: float) -> list[str]:
    """Renew the leases of what a worker holds; return the labels of what it should stop.

    An attempt is to be stopped when it is no longer the store's: lost, cancelled, superseded.
    """
    connection.execute(
        _SEEN,
        {
            "worker_id": beat.worker_id,
            "capacity": beat.capacity,
            "in_flight": len(beat.attempts),
            "loop_lag_ms": beat.loop_lag_ms,
            "stopping": beat.stopping,
            "takes": {"queues": beat.queues, "base_urls": beat.base_urls},
            "activity": stored_activity(beat.activity),
        },
    )
    if not beat.attempts:
        return []
    held = sorted(beat.attempts, key=lambda attempt: attempt.rollout_id)
    started = [attempt for attempt in held if attempt.phase != "reserved"]
    connection.execute(
        _START,
        {
            "ids": [attempt.rollout_id for attempt in started],
            "nos": [attempt.attempt_no for attempt in started],
        },
    )
    keys = {
        "ids": [attempt.rollout_id for attempt in held],
        "nos": [attempt.attempt_no for attempt in held],
    }
    connection.execute(
        _RENEW,
        keys
        | {
            "phases": [attempt.phase for attempt in held],
            "steps": [attempt.step for attempt in held],
            "worker_id": beat.worker_id,
            "lease_s": lease_s,
        },
    )
    return [label_of(*row) for row in connection.execute(_FENCED, keys)]


# Of two dispatchers the one that committed first may publish last: hence a grace between the two
# dispatches when one request is said to have been passed by another.
_SILENT = text("""
WITH passed AS (
    SELECT run_id, max(dispatched_at) - make_interval(secs => :grace_s) AS at FROM attempts
    WHERE state = 'running' AND started_at < now() - make_interval(secs => :grace_s) AND :fifo
    GROUP BY run_id
), suspects AS MATERIALIZED (
    -- Chosen before their rollouts are looked up: nearly all that is in flight is not silent.
    SELECT a.*, p.process_id, p.capacity, p.last_seen_at,
           coalesce(p.last_seen_at + make_interval(secs => :lease_s), a.lease_until) AS silent_from,
           CASE WHEN p.process_id IS NULL THEN a.rollout_id END AS alone
    FROM attempts a LEFT JOIN passed ON passed.run_id = a.run_id
    LEFT JOIN processes p ON p.process_id = a.worker_id
    WHERE a.state IN ('dispatched', 'running')
      AND ((a.lease_until < now() AND a.lease_until < :watermark
            -- All that a dead worker held is given up together, or nobody could say who was with
            -- whom; what a living one holds no more waits a little for that.
            AND (p.process_id IS NULL
                 OR p.last_seen_at < least(now(), :watermark) - make_interval(secs => :lease_s)
                 OR a.lease_until
                    < least(now(), :watermark) - make_interval(secs => :lease_s / 2)))
           OR (a.worker_id IS NULL
               AND a.dispatched_at < :watermark - make_interval(secs => :grace_s)
               AND a.dispatched_at < greatest(passed.at, CASE
                   WHEN CAST(:empty_at AS timestamptz)
                        < :watermark - make_interval(secs => :grace_s)
                   THEN CAST(:empty_at AS timestamptz) - make_interval(secs => :grace_s) END)))
    ORDER BY silent_from, alone FETCH FIRST (:most) ROWS WITH TIES
)
SELECT a.run_id, r.group_id, a.rollout_id, a.attempt_no, runs.slug, r.group_no, r.rollout_index,
       a.worker_id, r.lost_count, a.dispatched_at, a.started_at, a.last_seen_at,
       CASE WHEN a.worker_id IS NOT NULL THEN a.capacity > 0
                 AND a.last_seen_at < now() - make_interval(secs => :lease_s)
            -- Killed before it could say what it had taken.
            ELSE EXISTS (SELECT FROM processes d WHERE d.kind = 'worker' AND d.capacity > 0
                         AND d.last_seen_at < now() - make_interval(secs => :grace_s)
                         AND d.last_seen_at > a.dispatched_at - make_interval(secs => :lease_s))
       END AS worker_died
FROM suspects a JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = a.run_id
ORDER BY a.silent_from, a.alone
""")


def silent_attempts(
    connection: Connection,
    *,
    watermark: datetime,
    empty_at: datetime | None,
    fifo: bool,
    lease_s: float,
    grace_s: float,
    most: int,
) -> list[SilentAttempt]:
    """Return attempts that must be given up, longest silence first.

    Those whose lease ran out; and those that no worker ever held although their request is
    certainly no longer on the broker: requests behind it were started, or the queue was empty.

    Args:
        connection: An open transaction.
        watermark: Until when the collector has read all that workers said; a lease that ran out
            later than this may have been renewed by a message not read yet.
        empty_at: A time at which no request waited on the broker, None where none is known. It
            proves something once `grace_s` has passed since: who took the last one has said so.
        fifo: Whether the broker delivers requests in order.
        lease_s: Silence after which a worker is dead.
        grace_s: Time a dispatcher has to publish, and a worker to announce what it took.
        most: Upper bound; all that one worker held counts as one.
    """
    rows = connection.execute(
        _SILENT,
        {
            "watermark": watermark,
            "empty_at": empty_at,
            "fifo": fifo,
            "lease_s": lease_s,
            "grace_s": grace_s,
            "most": most,
        },
    )
    return [
        SilentAttempt(
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=row.rollout_id,
            attempt_no=row.attempt_no,
            label=label_of(row.slug, row.group_no, row.rollout_index, row.attempt_no),
            worker_id=row.worker_id,
            lost_count=row.lost_count,
            worker_died=bool(row.worker_died),
            dispatched_at=row.dispatched_at,
            started_at=row.started_at,
            worker_seen_at=row.last_seen_at,
        )
        for row in rows
    ]


def suspects_in_flight(connection: Connection) -> list[Suspect]:
    """Return the attempts in flight whose rollouts were lost before."""
    rows = connection.execute(
        text(
            "SELECT a.rollout_id, r.lost_count, a.worker_id, a.dispatched_at, a.started_at"
            " FROM attempts a JOIN rollouts r USING (rollout_id)"
            " WHERE a.state IN ('dispatched', 'running') AND r.lost_count > 0"
        )
    )
    return [Suspect(*row) for row in rows]
