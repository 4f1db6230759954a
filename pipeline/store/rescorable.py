"""The stored trajectories of a run that a reward can score again.

Used by the requests for rescores and by the messages made of them. Reads only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import label_of
from pipeline.store.engine import BINARY
from pipeline.store.runs import Run


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A rollout that ended, with the data that a scorer needs; `body` or `body_uri` is set."""

    rollout_id: UUID
    group_id: UUID
    group_no: int
    rollout_index: int
    n: int
    attempt_no: int
    label: str
    prompt: dict[str, Any]
    codec: str
    body: bytes | None
    body_uri: str | None
    body_digest: str | None


#: The end of a statement with the parameters `run_id` and `error_class`.
RESCORABLE = """
FROM rollouts r JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
JOIN attempts a ON a.rollout_id = r.rollout_id
    AND a.attempt_no = coalesce(r.winner_attempt_no, r.attempt_no)
JOIN trajectories t ON t.rollout_id = a.rollout_id AND t.attempt_no = a.attempt_no
WHERE r.run_id = :run_id
  AND ((r.state = 'succeeded' AND CAST(:error_class AS text) IS NULL)
       OR (r.state = 'failed' AND a.phase = 'scoring'
           AND r.error_class = coalesce(:error_class, r.error_class)))
"""


def count_rescorable(
    connection: Connection, run: Run, *, error_class: ErrorClass | None = None
) -> int:
    """Return how many trajectories `read_rescorable` would give."""
    values = {"run_id": run.run_id, "error_class": error_class}
    return connection.execute(text("SELECT count(*)" + RESCORABLE), values).scalar_one()


def read_rescorable(
    connection: Connection,
    run: Run,
    *,
    error_class: ErrorClass | None = None,
    ids: Collection[UUID] | None = None,
) -> list[StoredTrajectory]:
    """Return trajectories in order of their rollouts' ids.

    The trajectories are those of the winning attempts of succeeded rollouts, and of the last
    attempts of rollouts that failed in scoring. Other rollouts have no complete trajectory.

    Args:
        connection: An open transaction.
        run: The run.
        error_class: Only rollouts that failed with this class.
        ids: Only of these rollouts.
    """
    query = (
        "SELECT r.rollout_id, r.group_id, r.group_no, r.rollout_index, g.n_rollouts AS n,"
        " a.attempt_no, p.payload AS prompt, t.codec, t.body, t.body_uri, t.body_digest"
        + RESCORABLE
        + ("" if ids is None else "AND r.rollout_id = ANY(:ids)")
        + " ORDER BY r.rollout_id"
    )
    values: dict[str, Any] = {"run_id": run.run_id, "error_class": error_class}
    values |= {} if ids is None else {"ids": list(ids)}
    return [
        StoredTrajectory(
            **row,
            label=label_of(run.slug, row["group_no"], row["rollout_index"], row["attempt_no"]),
        )
        for row in connection.execute(
            text(query), values, execution_options={BINARY: True}
        ).mappings()
    ]
