"""Journals in the store: frames of running attempts, kept until their rollout has ended.

Written by the collector, read by the dispatcher for the next attempt, deleted by the reconciler.
Each function is a statement or two inside the caller's transaction. Must not: read a frame's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import JournalFrame
from pipeline.contract.rollout import label_of
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


# Only an attempt under way may add to the journal: what comes later may belong to an error after
# which the next attempt starts afresh.
_ADD = text("""
INSERT INTO journals
    (rollout_id, attempt_no, first_call, run_id, n_calls, body, body_uri, body_digest, body_bytes)
SELECT f.rollout_id, f.attempt_no, f.first_call, a.run_id, f.n_calls, f.body, f.body_uri,
       f.body_digest, f.body_bytes
FROM unnest(
    CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:firsts AS integer[]),
    CAST(:counts AS integer[]), CAST(:bodies AS bytea[]), CAST(:uris AS text[]),
    CAST(:digests AS text[]), CAST(:sizes AS bigint[])
) AS f (rollout_id, attempt_no, first_call, n_calls, body, body_uri, body_digest, body_bytes)
JOIN attempts a USING (rollout_id, attempt_no)
JOIN rollouts r USING (rollout_id, attempt_no)
WHERE a.state IN ('dispatched', 'running') AND r.state IN ('dispatched', 'running')
-- In one order: a frame that was delivered twice may be stored by two collectors at once.
ORDER BY f.rollout_id, f.attempt_no, f.first_call
ON CONFLICT DO NOTHING
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
SELECT j.attempt_no, j.first_call, j.n_calls, j.body, j.body_uri, j.body_digest, j.body_bytes,
       j.run_id, r.group_id, runs.slug, r.group_no, r.rollout_index
FROM journals j JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = r.run_id
WHERE rollout_id = :rollout_id AND j.attempt_no = ANY(:nos)
ORDER BY j.attempt_no, j.first_call
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
    values = {
        "ids": [frame.rollout_id for frame in frames],
        "nos": [frame.attempt_no for frame in frames],
        "firsts": [frame.first for frame in frames],
        "counts": [frame.n_calls for frame in frames],
        "bodies": Bodies(frame.body or None for frame in frames),
        "uris": [frame.body_uri for frame in frames],
        "digests": [frame.body_digest for frame in frames],
        "sizes": [frame.body_bytes or len(frame.body) for frame in frames],
    }
    return connection.execute(_ADD, values).rowcount


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


def read_frames(
    connection: Connection, rollout_id: UUID, attempt_nos: Sequence[int]
) -> list[JournalFrame]:
    """Return the frames that these attempts of a rollout recorded, in order."""
    rows = connection.execute(_FRAMES, {"rollout_id": rollout_id, "nos": list(attempt_nos)})
    return [
        JournalFrame(
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=rollout_id,
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
