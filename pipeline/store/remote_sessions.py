"""Sessions of remote agents that may exist: a row from the attempt's claim to the session's stop.

The dispatcher opens rows and counts them against the quota, collectors hand attempts over to their
sessions, and the services of `pipeline/agentcore` read both. Must not: call the remote service.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.messages import AttemptKey, Completion
from pipeline.contract.rollout import label_of
from pipeline.store.attempt_keys import key_arrays
from pipeline.store.processes import ALIVE_S
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.store.runs import Run

#: Time between the end of a session's time and that of its attempt's lease. The services of
#: `pipeline/agentcore` end the attempt in between; after it, the reconciler gives it up.
_MARGIN_S = 300.0
#: Time for which a service that stops a session keeps others from doing so.
_STOP_LEASE_S = 30.0


class RemoteAttempt(NamedTuple):
    """An attempt whose session may still give a result."""

    run_id: UUID
    group_id: UUID
    rollout_id: UUID
    attempt_no: int
    run: str
    group_no: int
    label: str
    target: AgentCoreTarget
    worker_id: str | None
    started_at: datetime | None
    is_overdue: bool
    policy_version: int
    reward: str | None = None  #: the run's; None: that of the app counts

    @property
    def key(self) -> AttemptKey:
        """The attempt's key in the store."""
        return self.rollout_id, self.attempt_no


class StoppableSession(NamedTuple):
    """A session whose outcome is known."""

    rollout_id: UUID
    attempt_no: int
    run: str
    label: str
    target: AgentCoreTarget
    may_start_late: bool  #: its worker may still invoke it


class SessionWaits(NamedTuple):
    """The figures that show whether a run waits for AgentCore."""

    own: int  #: sessions of this run that may exist
    others: int  #: those of other runs
    ended: int  #: of all of them, those whose outcome is known and that are not stopped yet
    most: int | None  #: `agentcore.max_sessions` of the controller; None: none reports
    throttled: int  #: rollouts that wait because their last call was throttled
    refused: int  #: those for which the account had no free session
    unscored: int = 0  #: rollouts whose trajectory waits for its reward
    reward: str | None = None  #: the reward that scores them


_OPEN = text("""
INSERT INTO remote_sessions (rollout_id, attempt_no, run_id)
SELECT id, no, :run_id FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS g (id, no)
ON CONFLICT DO NOTHING
""")

_COUNT = text("SELECT count(*) FROM remote_sessions")

_COUNT_OF = text("SELECT count(*) FROM remote_sessions WHERE run_id = :run_id")

# The count of unscored rollouts needs no index of its own: the indexes of rollouts in flight and of
# rollouts that are queued again limit it to few rows, and another index would slow down claims.
_WAITS = text("""
SELECT (SELECT count(*) FROM remote_sessions WHERE run_id = :run_id) AS own,
    (SELECT count(*) FROM remote_sessions WHERE run_id <> :run_id) AS others,
    (SELECT count(*) FROM remote_sessions JOIN attempts USING (rollout_id, attempt_no)
     WHERE state NOT IN ('dispatched', 'running')) AS ended,
    (SELECT min(CAST(takes ->> 'max_sessions' AS integer)) FROM processes
     WHERE kind = 'collector' AND last_seen_at > now() - make_interval(secs => :alive_s)) AS most,
    count(*) FILTER (WHERE a.error_code = 'throttled') AS throttled,
    count(*) FILTER (WHERE a.error_code = 'session_quota') AS refused,
    (SELECT count(*) FROM rollouts WHERE run_id = :run_id AND unscored_no IS NOT NULL
     AND (state IN ('dispatched', 'running') OR state = 'queued' AND attempt_no > 0)) AS unscored,
    CAST(:reward AS text) AS reward
FROM rollouts r JOIN attempts a USING (rollout_id, attempt_no)
WHERE r.run_id = :run_id AND r.state = 'queued' AND r.attempt_no > 0 AND r.not_before > now()
""")

# Rollouts before attempts: the order of all locks.
_HAND_OVER = text("""
WITH given AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:workers AS text[]))
        AS g (id, no, worker_id)
), locked AS (
    SELECT r.rollout_id, r.state FROM rollouts r JOIN given ON r.rollout_id = given.id
    WHERE r.attempt_no = given.no AND r.state IN ('dispatched', 'running')
    ORDER BY r.rollout_id FOR UPDATE OF r
), started AS (
    UPDATE rollouts r SET state = 'running' FROM locked
    WHERE r.rollout_id = locked.rollout_id AND locked.state = 'dispatched'
    RETURNING r.rollout_id, r.run_id, r.attempt_no
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state)
    SELECT run_id, 'rollout', rollout_id, attempt_no, 'dispatched', 'running' FROM started
)
UPDATE attempts a SET state = 'running', phase = 'remote', worker_id = given.worker_id,
    started_at = coalesce(a.started_at, now()),
    lease_until = now() + make_interval(
        secs => CAST(runs.config -> 'agentcore' ->> 'session_timeout_s' AS double precision)
                + :margin_s)
FROM given JOIN locked ON locked.rollout_id = given.id, runs
WHERE a.rollout_id = given.id AND a.attempt_no = given.no AND runs.run_id = a.run_id
  AND a.state IN ('dispatched', 'running')
""")

# The session of an attempt that was given up before its worker invoked it has to be stopped too.
_REOPEN = text("""
INSERT INTO remote_sessions (rollout_id, attempt_no, run_id)
SELECT a.rollout_id, a.attempt_no, a.run_id
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS g (id, no)
JOIN attempts a ON a.rollout_id = g.id AND a.attempt_no = g.no
ON CONFLICT DO NOTHING
""")

_ATTEMPTS = """
SELECT a.run_id, r.group_id, a.rollout_id, a.attempt_no, runs.slug, r.group_no, r.rollout_index,
       runs.config -> 'agentcore' AS target, a.worker_id, a.started_at,
       a.phase = 'remote' AND a.lease_until < now() + make_interval(secs => :margin_s)
           AS is_overdue, runs.policy_version, runs.config ->> 'reward' AS reward
FROM {source} JOIN rollouts r USING (rollout_id)
JOIN runs ON runs.run_id = a.run_id
WHERE r.state IN ('queued', 'dispatched', 'running') AND r.unscored_no IS NULL
  AND jsonb_typeof(runs.config -> 'agentcore') = 'object'
  AND a.state IN ('dispatched', 'running', 'lost')
"""

_WAITING = text(
    _ATTEMPTS.format(source="remote_sessions s JOIN attempts a USING (rollout_id, attempt_no)")
    + " AND (cardinality(CAST(:runs AS text[])) = 0 OR runs.slug = ANY(:runs))"
)

_NAMED = text(
    _ATTEMPTS.format(
        source="unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS k (id, no)"
        " JOIN attempts a ON a.rollout_id = k.id AND a.attempt_no = k.no"
    )
)

_KNOWN = text("""
SELECT a.rollout_id, a.attempt_no
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS k (id, no)
JOIN attempts a ON a.rollout_id = k.id AND a.attempt_no = k.no
""")

_TAKE_STOPPABLE = text("""
WITH ended AS (
    SELECT s.rollout_id, s.attempt_no, a.state, a.ended_at FROM remote_sessions s
    JOIN attempts a USING (rollout_id, attempt_no) JOIN runs ON runs.run_id = s.run_id
    WHERE s.stop_lease_until < now() AND a.state NOT IN ('dispatched', 'running')
      AND (cardinality(CAST(:runs AS text[])) = 0 OR runs.slug = ANY(:runs))
    ORDER BY s.rollout_id, s.attempt_no LIMIT :most FOR UPDATE OF s SKIP LOCKED
), taken AS (
    UPDATE remote_sessions s SET stop_lease_until = now() + make_interval(secs => :lease_s)
    FROM ended WHERE s.rollout_id = ended.rollout_id AND s.attempt_no = ended.attempt_no
)
SELECT e.rollout_id, e.attempt_no, runs.slug, r.group_no, r.rollout_index,
       runs.config -> 'agentcore' AS target,
       e.state IN ('cancelled', 'lost', 'superseded')
           AND e.ended_at > now() - make_interval(secs => :late_s) AS may_start_late
FROM ended e JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = r.run_id
""")

_CLOSE = text("""
DELETE FROM remote_sessions s
USING unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS k (id, no)
WHERE s.rollout_id = k.id AND s.attempt_no = k.no
""")


def open_sessions(connection: Connection, run: Run, claimed: Sequence[ClaimedAttempt]) -> int:
    """Add the sessions of claimed attempts, in the transaction of their claim; return how many.

    An attempt that scores an earlier one's trajectory has no session.
    """
    keys = [(each.rollout_id, each.attempt_no) for each in claimed if each.unscored_no is None]
    connection.execute(_OPEN, key_arrays(keys) | {"run_id": run.run_id})
    return len(keys)


def count_sessions(connection: Connection, run_id: UUID | None = None) -> int:
    """Return the number of sessions that may exist, of one run or of all."""
    if run_id is None:
        return int(connection.execute(_COUNT).scalar_one())
    return int(connection.execute(_COUNT_OF, {"run_id": run_id}).scalar_one())


def session_waits(connection: Connection, run: Run) -> SessionWaits | None:
    """Return the figures of a run's waits for AgentCore; None: it is not executed there."""
    if run.config.agentcore is None:
        return None
    values = {"run_id": run.run_id, "alive_s": ALIVE_S, "reward": run.config.reward}
    return SessionWaits._make(connection.execute(_WAITS, values).one())


def hand_over(connection: Connection, completions: Sequence[Completion]) -> None:
    """Record that remote sessions work on attempts: their leases last as long as the sessions."""
    if not completions:
        return
    keys = key_arrays(completion.key for completion in completions)
    workers = {"workers": [completion.worker_id for completion in completions]}
    connection.execute(_HAND_OVER, keys | workers | {"margin_s": _MARGIN_S})
    connection.execute(_REOPEN, keys)


def waiting_attempts(connection: Connection, runs: Sequence[str]) -> list[RemoteAttempt]:
    """Return the attempts whose sessions may exist and whose rollouts have no outcome yet.

    Args:
        connection: An open transaction.
        runs: Only of these runs; empty: of all.
    """
    values = {"runs": list(runs), "margin_s": _MARGIN_S}
    return [_attempt(row) for row in connection.execute(_WAITING, values)]


def attempts_named(connection: Connection, keys: Sequence[AttemptKey]) -> list[RemoteAttempt]:
    """Return those of the attempts whose outcome is still wanted."""
    values = key_arrays(keys) | {"margin_s": _MARGIN_S}
    return [_attempt(row) for row in connection.execute(_NAMED, values)]


def known_attempts(connection: Connection, keys: Sequence[AttemptKey]) -> set[AttemptKey]:
    """Return those of the attempts that this store has, with or without an outcome."""
    return {(row[0], row[1]) for row in connection.execute(_KNOWN, key_arrays(keys))}


def take_stoppable(
    connection: Connection, *, runs: Sequence[str], most: int, late_s: float
) -> list[StoppableSession]:
    """Take sessions to stop; another service gets those that stay open after half a minute.

    Args:
        connection: An open transaction.
        runs: Only of these runs; empty: of all.
        most: Upper bound.
        late_s: Time after its attempt's end in which a worker may still invoke a session.
    """
    values = {"runs": list(runs), "most": most, "lease_s": _STOP_LEASE_S, "late_s": late_s}
    return [
        StoppableSession(
            row.rollout_id,
            row.attempt_no,
            row.slug,
            label_of(row.slug, row.group_no, row.rollout_index, row.attempt_no),
            AgentCoreTarget.model_validate(row.target),
            row.may_start_late,
        )
        for row in connection.execute(_TAKE_STOPPABLE, values)
    ]


def close_sessions(connection: Connection, keys: Sequence[AttemptKey]) -> None:
    """Remove sessions that do not exist any more."""
    connection.execute(_CLOSE, key_arrays(keys))


def _attempt(row: Any) -> RemoteAttempt:
    return RemoteAttempt(
        run_id=row.run_id,
        group_id=row.group_id,
        rollout_id=row.rollout_id,
        attempt_no=row.attempt_no,
        run=row.slug,
        group_no=row.group_no,
        label=label_of(row.slug, row.group_no, row.rollout_index, row.attempt_no),
        target=AgentCoreTarget.model_validate(row.target),
        worker_id=row.worker_id,
        started_at=row.started_at,
        is_overdue=row.is_overdue,
        policy_version=row.policy_version,
        reward=row.reward,
    )
