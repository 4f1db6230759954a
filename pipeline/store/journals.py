"""Journals in the store: frames of running attempts, kept until their rollout has ended.

Written by the collector, read by the dispatcher for the next attempt and by the results service
for the trajectory of a remote one, deleted by the reconciler. Each function is a statement or two
inside the caller's transaction. Must not: read a frame's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import AttemptKey, JournalFrame
from pipeline.contract.rollout import label_of
from pipeline.store.attempt_keys import key_arrays
from pipeline.store.engine import BINARY, Bodies


class EarlierAttempt(NamedTuple):
    """An attempt of a rollout that is dispatched again, with the size of what it recorded."""

    rollout_id: UUID
    attempt_no: int
    error_class: ErrorClass | None
    error_code: str | None
    calls_replayed: int
    journal_bytes: int


class EndedJournal(NamedTuple):
    """The journal of a rollout that has ended."""

    run_id: UUID
    rollout_id: UUID
    n_frames: int
    n_bytes: int
    has_objects: bool  #: whether bodies of its frames are in the payload store


_GIVEN = """
unnest(
    CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:firsts AS bigint[]),
    CAST(:counts AS integer[]), CAST(:bodies AS bytea[]), CAST(:uris AS text[]),
    CAST(:digests AS text[]), CAST(:sizes AS bigint[])
) AS f (rollout_id, attempt_no, first_call, n_calls, body, body_uri, body_digest, body_bytes)
JOIN attempts a USING (rollout_id, attempt_no)
JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = r.run_id
"""
_IS_REMOTE = "jsonb_typeof(runs.config -> 'agentcore') = 'object'"

# Only an attempt under way may add to the journal: a later frame may belong to an error after which
# the next attempt replays nothing. The calls of a remote attempt are its trajectory: they are
# kept for as long as its result would be accepted, also if the attempt was given up as lost.
_ADD = text(f"""
INSERT INTO journals
    (rollout_id, attempt_no, first_call, run_id, n_calls, body, body_uri, body_digest, body_bytes)
SELECT f.rollout_id, f.attempt_no, f.first_call, a.run_id, f.n_calls, f.body, f.body_uri,
       f.body_digest, f.body_bytes
FROM {_GIVEN}
WHERE r.attempt_no = a.attempt_no AND a.state IN ('dispatched', 'running')
      AND r.state IN ('dispatched', 'running')
   OR {_IS_REMOTE} AND a.state IN ('dispatched', 'running', 'lost')
      AND r.state IN ('queued', 'dispatched', 'running')
-- In one order: a frame that was delivered twice may be stored by two collectors at once.
ORDER BY f.rollout_id, f.attempt_no, f.first_call
ON CONFLICT DO NOTHING
""")

_LATE = text(f"""
SELECT a.rollout_id, a.attempt_no, f.first_call FROM {_GIVEN}
WHERE {_IS_REMOTE} AND a.state IN ('succeeded', 'failed', 'timed_out') AND NOT EXISTS (
    SELECT FROM journals j WHERE j.rollout_id = f.rollout_id AND j.attempt_no = f.attempt_no
      AND j.first_call = f.first_call)
""")

_EARLIER = text("""
WITH recorded AS (
    SELECT rollout_id, attempt_no, sum(body_bytes)::bigint AS journal_bytes FROM journals
    WHERE rollout_id = ANY(:ids) GROUP BY rollout_id, attempt_no
)
SELECT rollout_id, attempt_no, a.error_class, a.error_code, coalesce(a.calls_replayed, 0),
       coalesce(journal_bytes, 0)
FROM attempts a LEFT JOIN recorded USING (rollout_id, attempt_no)
WHERE a.rollout_id IN (SELECT rollout_id FROM recorded)
ORDER BY rollout_id, attempt_no
""")

_FRAMES = text("""
SELECT j.rollout_id, j.attempt_no, j.first_call, j.n_calls, j.body, j.body_uri, j.body_digest,
       j.body_bytes, j.run_id, r.group_id, runs.slug, r.group_no, r.rollout_index
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS k (rollout_id, attempt_no)
JOIN journals j USING (rollout_id, attempt_no)
JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = r.run_id
ORDER BY j.rollout_id, j.attempt_no, j.first_call
""").execution_options(**{BINARY: True})

_ENDED = text("""
SELECT j.run_id, j.rollout_id, count(*), sum(j.body_bytes)::bigint, bool_or(j.body_uri IS NOT NULL)
FROM journals j LEFT JOIN rollouts r USING (rollout_id)
WHERE r.state IS NULL OR r.state IN ('succeeded', 'failed', 'cancelled')
GROUP BY j.run_id, j.rollout_id LIMIT :most
""")

_DELETE = text("""
DELETE FROM journals WHERE (rollout_id, attempt_no, first_call) IN (
    SELECT rollout_id, attempt_no, first_call FROM journals
    WHERE rollout_id = ANY(:ids)
    ORDER BY rollout_id, attempt_no, first_call FOR UPDATE SKIP LOCKED)
""")


def add_frames(connection: Connection, frames: Sequence[JournalFrame]) -> int:
    """Store frames of attempts under way; return how many were new and are stored.

    Frames of attempts that ended, or that another attempt follows, are ignored.
    """
    return connection.execute(_ADD, _columns(frames)).rowcount


def late_frames(connection: Connection, frames: Sequence[JournalFrame]) -> list[JournalFrame]:
    """Return those of the frames that came after their remote attempt's outcome was recorded."""
    found = {tuple(row) for row in connection.execute(_LATE, _columns(frames))}
    return [f for f in frames if (f.rollout_id, f.attempt_no, f.first) in found]


def earlier_attempts(
    connection: Connection, rollout_ids: Sequence[UUID]
) -> dict[UUID, list[EarlierAttempt]]:
    """Return all attempts of those rollouts that have a journal, in order."""
    found: dict[UUID, list[EarlierAttempt]] = {}
    for row in connection.execute(_EARLIER, {"ids": list(rollout_ids)}):
        error_class = None if row.error_class is None else ErrorClass(row.error_class)
        attempt = EarlierAttempt(row[0], row[1], error_class, *row[3:])
        found.setdefault(attempt.rollout_id, []).append(attempt)
    return found


def read_frames(connection: Connection, keys: Sequence[AttemptKey]) -> list[JournalFrame]:
    """Return the frames that these attempts recorded, in the order of attempts and calls."""
    rows = connection.execute(_FRAMES, key_arrays(keys))
    return [
        JournalFrame(
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=row.rollout_id,
            attempt_no=row.attempt_no,
            label=label_of(row.slug, row.group_no, row.rollout_index, row.attempt_no),
            first=row.first_call,
            n_calls=row.n_calls,
            body=bytes(row.body or b""),
            body_bytes=row.body_bytes,
            body_uri=row.body_uri,
            body_digest=row.body_digest,
        )
        for row in rows
    ]


def ended_journals(connection: Connection, *, most: int) -> list[EndedJournal]:
    """Return up to `most` journals of rollouts that have ended, or were removed."""
    return [EndedJournal(*row) for row in connection.execute(_ENDED, {"most": most})]


def delete_journals(connection: Connection, rollout_ids: Sequence[UUID]) -> None:
    """Delete the journals of rollouts; rows that another transaction holds are left."""
    connection.execute(_DELETE, {"ids": list(rollout_ids)})


def _columns(frames: Sequence[JournalFrame]) -> dict[str, Any]:
    return key_arrays(frame.key for frame in frames) | {
        "firsts": [frame.first for frame in frames],
        "counts": [frame.n_calls for frame in frames],
        "bodies": Bodies(frame.body or None for frame in frames),
        "uris": [frame.body_uri for frame in frames],
        "digests": [frame.body_digest for frame in frames],
        "sizes": [frame.body_bytes or len(frame.body) for frame in frames],
    }
