"""Leases of attempts: renewed by heartbeats, and found when they have expired.

Used by the collector and the reconciler. Each function is a few set-based statements inside the
caller's transaction. Renewals wait for no lock: the next heartbeat renews what was locked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from pipeline.contract.messages import Heartbeat
from pipeline.contract.rollout import label_of
from pipeline.store.activity import stored_activity
from pipeline.store.attempt_keys import key_arrays


class SilentAttempt(NamedTuple):
    """An attempt whose worker has been silent for longer than its lease."""

    run_id: UUID
    group_id: UUID
    rollout_id: UUID
    attempt_no: int
    label: str
    worker_id: str | None


class QueueInFlight(NamedTuple):
    """A request queue with attempts in flight."""

    queue: str
    run_ids: list[UUID]
    started_up_to: datetime | None  #: the latest dispatch among its running attempts


_START = text("""
WITH locked AS (
    SELECT r.rollout_id
    FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS reported (id, no)
    JOIN rollouts r ON r.rollout_id = reported.id
    WHERE r.state = 'dispatched' AND r.attempt_no = reported.no
    FOR UPDATE OF r SKIP LOCKED
), started AS (
    UPDATE rollouts r SET state = 'running' FROM locked WHERE r.rollout_id = locked.rollout_id
    RETURNING r.rollout_id, r.run_id, r.attempt_no
)
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state)
SELECT run_id, 'rollout', rollout_id, attempt_no, 'dispatched', 'running' FROM started
""")

# A lease is renewed once a third of it has passed, so that at most every second heartbeat writes.
_RENEW = text("""
WITH locked AS (
    SELECT b.* FROM attempts a
    JOIN unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:phases AS text[]),
                CAST(:steps AS integer[]), CAST(:workers AS text[]))
        AS b (id, no, phase, step, worker_id)
        ON a.rollout_id = b.id AND a.attempt_no = b.no
    WHERE a.state IN ('dispatched', 'running')
      -- A heartbeat from before the handover must not shorten the lease of a remote session.
      AND a.phase IS DISTINCT FROM 'remote'
      AND (a.worker_id IS DISTINCT FROM b.worker_id OR a.phase IS DISTINCT FROM b.phase
           OR a.lease_until < now() + make_interval(secs => :lease_s * 2 / 3))
    FOR UPDATE OF a SKIP LOCKED
)
UPDATE attempts a SET
    state = CASE WHEN b.phase = 'reserved' THEN a.state ELSE 'running' END,
    worker_id = b.worker_id, phase = b.phase, step = b.step,
    started_at = CASE WHEN b.phase = 'reserved' THEN NULL ELSE coalesce(a.started_at, now()) END,
    lease_until = now() + make_interval(secs => :lease_s)
FROM locked b WHERE a.rollout_id = b.id AND a.attempt_no = b.no
""")

# An attempt whose own worker has reported its end is not stopped: the heartbeat may be older than
# that report.
_FENCED = text("""
SELECT runs.slug, r.group_no, r.rollout_index, b.no
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:workers AS text[]))
    AS b (id, no, worker_id)
JOIN attempts a ON a.rollout_id = b.id AND a.attempt_no = b.no
JOIN rollouts r ON r.rollout_id = b.id JOIN runs ON runs.run_id = r.run_id
WHERE a.state NOT IN ('dispatched', 'running')
  AND (a.state IN ('lost', 'cancelled') OR a.worker_id IS DISTINCT FROM b.worker_id)
""")

_SEEN = text("""
INSERT INTO processes
    (process_id, kind, capacity, in_flight, loop_lag_ms, stopping, takes, activity)
SELECT worker_id, 'worker', capacity, in_flight, loop_lag_ms, stopping, takes, activity
FROM jsonb_to_recordset(:workers) AS w (worker_id text, capacity integer, in_flight integer,
    loop_lag_ms double precision, stopping boolean, takes jsonb, activity jsonb)
ORDER BY worker_id
ON CONFLICT (process_id) DO UPDATE SET last_seen_at = now(), capacity = excluded.capacity,
    in_flight = excluded.in_flight, loop_lag_ms = excluded.loop_lag_ms,
    stopping = excluded.stopping, takes = excluded.takes,
    activity = coalesce(nullif(excluded.activity, '{}'), processes.activity)
""").bindparams(bindparam("workers", type_=JSONB))


def keep_alive(
    connection: Connection, heartbeats: Sequence[Heartbeat], *, lease_s: float
) -> list[str]:
    """Renew the leases of the attempts in heartbeats; return the labels of those to stop.

    An attempt is to be stopped when it was given up or cancelled, or another worker ended it.

    Args:
        connection: An open transaction that has taken its other locks.
        heartbeats: One of each worker.
        lease_s: Time for which the attempts count as alive.
    """
    # An attempt that two workers list belongs to the one whose heartbeat came last.
    holders = {
        attempt.key: (attempt, heartbeat.worker_id)
        for heartbeat in heartbeats
        for attempt in heartbeat.attempts
    }
    fenced: list[str] = []
    if holders:
        held = [attempt for attempt, _ in holders.values()]
        started = [key for key, (attempt, _) in holders.items() if attempt.phase != "reserved"]
        connection.execute(_START, key_arrays(started))
        reported = {
            "phases": [attempt.phase for attempt in held],
            "steps": [attempt.step for attempt in held],
            "lease_s": lease_s,
        }
        keys = key_arrays(holders) | {"workers": [worker_id for _, worker_id in holders.values()]}
        connection.execute(_RENEW, keys | reported)
        fenced = [label_of(*row) for row in connection.execute(_FENCED, keys)]
    if heartbeats:
        workers = [_worker(heartbeat) for heartbeat in heartbeats]
        connection.execute(_SEEN, {"workers": workers})
    return fenced


def _worker(heartbeat: Heartbeat) -> dict[str, Any]:
    return {
        "worker_id": heartbeat.worker_id,
        "capacity": heartbeat.capacity,
        "in_flight": len(heartbeat.attempts),
        "loop_lag_ms": heartbeat.loop_lag_ms,
        "stopping": heartbeat.stopping,
        "takes": {"queues": heartbeat.queues, "base_urls": heartbeat.base_urls},
        "activity": stored_activity(heartbeat.activity),
    }


_QUEUES = text("""
SELECT runs.config ->> 'queue' AS queue, array_agg(DISTINCT run_id) AS run_ids,
       max(dispatched_at) FILTER (WHERE a.state = 'running') AS started_up_to
FROM attempts a JOIN runs USING (run_id) WHERE a.state IN ('dispatched', 'running') GROUP BY queue
""")

_SILENT = text("""
WITH departed AS (
    SELECT * FROM unnest(CAST(:run_ids AS uuid[]), CAST(:before AS timestamptz[]))
        AS d (run_id, before)
), silent AS MATERIALIZED (
    -- Silent attempts are few, so they are selected before the join with rollouts.
    SELECT a.* FROM attempts a LEFT JOIN departed ON departed.run_id = a.run_id
    WHERE a.state IN ('dispatched', 'running')
      AND ((a.lease_until < now() AND a.lease_until < :watermark
            AND (a.worker_id IS NOT NULL OR :expire))
           OR (a.worker_id IS NULL
               AND a.dispatched_at < departed.before - make_interval(secs => :grace_s)))
    ORDER BY a.lease_until LIMIT :most
)
SELECT a.run_id, r.group_id, a.rollout_id, a.attempt_no, runs.slug, r.group_no, r.rollout_index,
       a.worker_id
FROM silent a JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = a.run_id
ORDER BY a.lease_until
""")

_AS_STORED = [name for name in SilentAttempt._fields if name != "label"]


def queues_in_flight(connection: Connection) -> list[QueueInFlight]:
    """Return the request queues of the attempts in flight."""
    return [QueueInFlight(*row) for row in connection.execute(_QUEUES)]


def silent_attempts(
    connection: Connection,
    *,
    watermark: datetime,
    departed: Mapping[UUID, datetime],
    expire: bool,
    grace_s: float,
    most: int,
) -> list[SilentAttempt]:
    """Return attempts that must be given up, longest silence first.

    These are attempts whose lease expired, and attempts that no worker listed although their
    request has left its queue.

    Args:
        connection: An open transaction.
        watermark: The time up to which the collector has read all messages; a lease that expired
            later may have been renewed by a message not read yet.
        departed: For each run, a time before which all of its requests have left their queue. Two
            dispatchers may publish in another order than they committed, so a request counts as
            departed only if it was dispatched `grace_s` before that time.
        expire: Whether the broker drops requests by their age. Then an attempt that no worker
            listed is lost when its unstarted lease expired; else its request may still be waiting.
        grace_s: Time a dispatcher has to publish, and a worker to announce a request.
        most: Upper bound.
    """
    rows = connection.execute(
        _SILENT,
        {
            "watermark": watermark,
            "run_ids": list(departed),
            "before": list(departed.values()),
            "expire": expire,
            "grace_s": grace_s,
            "most": most,
        },
    )
    return [
        SilentAttempt(
            label=label_of(row.slug, row.group_no, row.rollout_index, row.attempt_no),
            **{name: getattr(row, name) for name in _AS_STORED},
        )
        for row in rows
    ]
