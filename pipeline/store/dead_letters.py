"""Dead letters: messages and rollouts that could not be handled, kept with their reason.

The collector adds messages here; `outcome_rows.py` adds poison rollouts and `dropped_groups.py`
unreadable groups. The command line reads, redrives and drops dead letters. Must not: decode
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import NotFound
from pipeline.contract.messages import AttemptRef, Completion, JournalFrame, storable

_ADD = text("""
INSERT INTO dead_letters (kind, run_id, rollout_id, label, reason, body)
VALUES (:kind, :run_id, :rollout_id, :label, :reason, :body)
""")

#: The size to which larger messages are cut: the reason matters more than the bytes.
_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message, rollout or group that could not be handled; `body` is only of a message."""

    dead_letter_id: int
    kind: str
    run: str | None
    rollout_id: UUID | None
    label: str | None
    reason: str
    body_bytes: int
    first_seen_at: datetime
    redriven_at: datetime | None
    body: bytes | None = None


def add_malformed(connection: Connection, malformed: Sequence[tuple[str, str, bytes]]) -> None:
    """Keep messages that could not be decoded: (kind, reason, raw bytes) each."""
    for kind, reason, raw in malformed:
        _add(connection, kind, storable(reason), raw)


def add_unknown(connection: Connection, completions: Sequence[tuple[Completion, bytes]]) -> None:
    """Keep completions of attempts that this store never dispatched, each with its bytes."""
    for completion, raw in completions:
        reason = f"Attempt {completion.attempt_no} of it was never dispatched here."
        _add(connection, "completion", reason, raw, about=completion)


def add_late_frame(connection: Connection, frame: JournalFrame, reason: str, raw: bytes) -> None:
    """Keep calls of a remote attempt that came after its outcome."""
    _add(connection, "journal", reason, raw, about=frame)


def _add(
    connection: Connection, kind: str, reason: str, raw: bytes, *, about: AttemptRef | None = None
) -> None:
    values = {
        "kind": kind,
        "run_id": about and about.run_id,
        "rollout_id": about and about.rollout_id,
        "label": about and storable(about.label),
        "reason": reason,
        "body": raw[:_MOST_BYTES],
    }
    connection.execute(_ADD, values)


_SELECT = """
SELECT d.dead_letter_id, d.kind, runs.slug AS run, d.rollout_id, d.label, d.reason,
       coalesce(length(d.body), 0) AS body_bytes, d.first_seen_at, d.redriven_at {body}
FROM dead_letters d LEFT JOIN runs USING (run_id)
"""

_LIST = text(
    _SELECT.format(body="")
    + """
WHERE (CAST(:kind AS text) IS NULL OR d.kind = :kind)
  AND (CAST(:run_id AS uuid) IS NULL OR d.run_id = :run_id)
  AND (:redriven OR d.redriven_at IS NULL)
ORDER BY d.dead_letter_id DESC LIMIT :limit
"""
)

_GET = text(_SELECT.format(body=", d.body") + "WHERE d.dead_letter_id = :id FOR UPDATE OF d")

_MARK = text("UPDATE dead_letters SET redriven_at = now() WHERE dead_letter_id = :id")

_DROP = text("""
DELETE FROM dead_letters d USING (
    SELECT dead_letter_id FROM dead_letters WHERE dead_letter_id = ANY(:ids)
    ORDER BY dead_letter_id FOR UPDATE
) AS locked WHERE d.dead_letter_id = locked.dead_letter_id
""")


def list_dead_letters(
    connection: Connection,
    *,
    kind: str | None = None,
    run_id: UUID | None = None,
    redriven: bool = False,
    limit: int = 100,
) -> list[DeadLetter]:
    """Return the newest dead letters first, without their bodies.

    Args:
        connection: An open transaction.
        kind: `rollout`, `group`, `completion`, `heartbeat`, `journal`, …; None: all.
        run_id: Only dead letters of this run; None: all.
        redriven: Also dead letters that were requeued already.
        limit: Upper bound.
    """
    values = {"kind": kind, "run_id": run_id, "redriven": redriven, "limit": limit}
    return [DeadLetter(*row) for row in connection.execute(_LIST, values)]


def get_dead_letter(connection: Connection, dead_letter_id: int) -> DeadLetter:
    """Return a dead letter with its body, and lock it against a second redrive.

    Raises:
        NotFound: There is no dead letter of this number.
    """
    row = connection.execute(_GET, {"id": dead_letter_id}).one_or_none()
    if row is None:
        raise NotFound(f"There is no dead letter {dead_letter_id}.", remedy="See: rollout dlq list")
    return DeadLetter(*row)


def mark_redriven(connection: Connection, dead_letter_id: int) -> None:
    """Record that a dead letter was processed again."""
    connection.execute(_MARK, {"id": dead_letter_id})


def drop_dead_letters(connection: Connection, dead_letter_ids: Sequence[int]) -> int:
    """Delete dead letters; return how many there were."""
    return connection.execute(_DROP, {"ids": list(dead_letter_ids)}).rowcount
