"""The stored bodies of attempts: their bytes, or their URIs in the payload store.

Used by trainers for one attempt, by `rollout errors` for all attempts of a run, and by
`inspection.py`. Reads only. Must not: read the payload store.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.messages import AttemptKey
from pipeline.store.engine import BINARY
from pipeline.store.runs import Run

#: Bodies that are read at once.
_MOST = 100


class StoredBody(NamedTuple):
    """The body and the tokens of an attempt's trajectory, or their URIs in the payload store."""

    body: bytes | None
    body_uri: str | None
    body_digest: str | None
    codec: str | None
    tokens: bytes | None = None
    tokens_uri: str | None = None
    tokens_digest: str | None = None


_BODIES = text("""
SELECT rollout_id, attempt_no, t.body, t.body_uri, t.body_digest, t.codec FROM trajectories t
JOIN attempts a USING (rollout_id, attempt_no)
WHERE a.run_id = :run_id AND (rollout_id, attempt_no) > (:rollout_id, :attempt_no)
ORDER BY rollout_id, attempt_no LIMIT :most
""").execution_options(**{BINARY: True})

_BODY = text("""
SELECT body, body_uri, body_digest, codec FROM trajectories
WHERE rollout_id = :rollout_id AND attempt_no = :attempt_no
""").execution_options(**{BINARY: True})


def read_bodies(
    connection: Connection, run: Run, *, after: AttemptKey | None = None
) -> dict[AttemptKey, StoredBody]:
    """Return the next bodies of a run's stored trajectories, in order of rollouts and attempts."""
    rollout_id, attempt_no = after or (UUID(int=0), 0)
    values = {"rollout_id": rollout_id, "attempt_no": attempt_no}
    rows = connection.execute(_BODIES, values | {"run_id": run.run_id, "most": _MOST})
    return {(row[0], row[1]): StoredBody(*row[2:]) for row in rows}


def read_body_row(connection: Connection, rollout_id: UUID, attempt_no: int) -> StoredBody:
    """Return the stored body of an attempt, without its tokens."""
    values = {"rollout_id": rollout_id, "attempt_no": attempt_no}
    return StoredBody(*connection.execute(_BODY, values).one())
