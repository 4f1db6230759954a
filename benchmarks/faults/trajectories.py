"""The accepted trajectories of a run after its end, each with the execution that wrote it.

Agents write a random number of their execution into the trajectory, and rewards return it as a
part. `FaultRun` reads both for the evidence. Must not: use the product's check of digests, which is
what the invariant judges.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from benchmarks.faults import plugin
from benchmarks.faults.evidence import Row
from pipeline.contract.errors import PipelineError
from pipeline.contract.trajectory import digest_of, unpack_record
from pipeline.queue.claim_checks import load_body
from pipeline.queue.payloads import PayloadStore

_ACCEPTED = text("""
SELECT :slug || '-g' || lpad(group_no::text, 6, '0') || '-r' || rollout_index AS name,
       t.body, t.body_uri, t.body_digest, t.codec, w.value AS execution
FROM rollouts r
LEFT JOIN trajectories t
    ON t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no
LEFT JOIN rewards w ON w.rollout_id = r.rollout_id AND w.attempt_no = r.winner_attempt_no
    AND w.name = :part
WHERE r.run_id = :run_id AND r.state = 'succeeded'
ORDER BY group_no, rollout_index
""")


def read_trajectories(engine: Engine, payloads: PayloadStore, run_id: UUID, slug: str) -> list[Row]:
    """Return the trajectory of each succeeded rollout.

    Returns:
        Rows with the rollout's `name`, the `stored_digest` of the row and the `read_digest` of the
        body, the execution whose reward was accepted (`rewarded`) and the one that wrote the body
        (`written_by`); `unreadable` says why there is none.
    """
    values = {"run_id": run_id, "slug": slug, "part": plugin.EXECUTION_PART}
    with engine.connect() as connection:
        rows = connection.execute(_ACCEPTED, values).all()
    return [_read(row, payloads) for row in rows]


def _read(row: Any, payloads: PayloadStore) -> Row:
    found: Row = {
        "name": row.name,
        "stored_digest": row.body_digest,
        "read_digest": None,
        "rewarded": row.execution,
        "written_by": None,
        "unreadable": None,
    }
    try:
        body = row.body if row.body_uri is None else load_body(row.body_uri, None, payloads)
        if body is None:
            return found | {"unreadable": "no trajectory is stored"}
        record = unpack_record(bytes(body), row.codec)
    except PipelineError as error:
        return found | {"unreadable": str(error)}
    written_by = record.metadata.get(plugin.EXECUTION)
    return found | {"read_digest": digest_of(bytes(body)), "written_by": written_by}
