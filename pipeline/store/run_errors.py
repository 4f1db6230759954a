"""The errors of a run: by class, by worker, and their tracebacks grouped by equal call paths.

Used by `rollout errors` and the demo. Reads only. The worker has redacted the tracebacks that
it sent.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from pipeline.contract.rollout import label_of
from pipeline.store.runs import Run

_ERRORS_BY_CLASS = text("""
WITH met AS (
    SELECT error_class, coalesce(error_code, '') AS code, n AS attempts, 0 AS rollouts
    FROM attempt_tallies WHERE run_id = :run_id AND error_class IS NOT NULL
    UNION ALL
    SELECT coalesce(error_class, 'unknown'), coalesce(error_code, ''), 0, n
    FROM rollout_tallies WHERE run_id = :run_id AND state = 'failed'
), counted AS (
    SELECT error_class, code, sum(attempts) AS attempts, sum(rollouts) AS rollouts
    FROM met GROUP BY error_class, code HAVING (sum(attempts), sum(rollouts)) <> (0, 0)
)
SELECT counted.*, e.error_message, e.attempt_no, r.group_no, r.rollout_index
FROM counted
LEFT JOIN LATERAL (
    SELECT a.rollout_id, a.attempt_no, a.error_message FROM attempts a
    WHERE a.run_id = :run_id AND a.error_class = counted.error_class
      AND coalesce(a.error_code, '') = counted.code
    ORDER BY a.ended_at DESC LIMIT 1) AS e ON true
LEFT JOIN rollouts r USING (rollout_id)
ORDER BY rollouts DESC, attempts DESC, error_class, code
""")

_ERRORS_BY_WORKER = text("""
WITH counted AS (
    SELECT coalesce(worker_id, '(none)') AS worker, error_class, sum(n)::bigint AS n
    FROM attempt_tallies WHERE run_id = :run_id GROUP BY worker, error_class HAVING sum(n) <> 0
)
SELECT worker, sum(n)::bigint AS attempts,
       coalesce(sum(n) FILTER (WHERE error_class IS NOT NULL), 0)::bigint AS errors,
       coalesce(jsonb_object_agg(error_class, n) FILTER (WHERE error_class IS NOT NULL), '{}')
           AS by_class
FROM counted GROUP BY worker ORDER BY errors DESC, worker
""")

# Two tracebacks are equal if they differ only in the messages of their exceptions: a message may
# contain a value of the dataset row. `gn` replaces the message in every line of a chain.
_TRACEBACKS = text(r"""
WITH traced AS (
    SELECT rollout_id, attempt_no, ended_at, error_class, coalesce(error_code, '') AS code,
        md5(regexp_replace(error_detail, '^([A-Za-z0-9_.]+): .*$', '\1', 'gn')) AS path
    FROM attempts WHERE run_id = :run_id AND error_class IS NOT NULL AND error_detail <> ''
), numbered AS (
    SELECT *, count(*) OVER same AS attempts,
        row_number() OVER (same ORDER BY ended_at DESC, rollout_id) AS number
    FROM traced WINDOW same AS (PARTITION BY error_class, code, path)
), newest AS (
    SELECT * FROM numbered WHERE number = 1
    ORDER BY attempts DESC, error_class, code, rollout_id LIMIT :limit
)
SELECT n.error_class, n.code, n.attempts, n.attempt_no, a.error_message, a.error_detail,
    r.group_no, r.rollout_index
FROM newest n JOIN attempts a USING (rollout_id, attempt_no) JOIN rollouts r USING (rollout_id)
ORDER BY n.attempts DESC, n.error_class, n.code, rollout_id
""")


def errors_by_class(connection: Connection, run: Run) -> list[dict[str, Any]]:
    """Return for each error class and code: attempts that met it, rollouts that failed by it."""
    rows = connection.execute(_ERRORS_BY_CLASS, {"run_id": run.run_id})
    return [
        {
            "error_class": row.error_class,
            "code": row.code,
            "attempts": int(row.attempts),
            "rollouts": int(row.rollouts),
            "example": None
            if row.group_no is None
            else {
                "label": label_of(run.slug, row.group_no, row.rollout_index, row.attempt_no),
                "message": row.error_message,
            },
        }
        for row in rows
    ]


def errors_by_worker(connection: Connection, run: Run) -> list[dict[str, Any]]:
    """Return for each worker: its attempts, those with an error, and these by class."""
    rows = connection.execute(_ERRORS_BY_WORKER, {"run_id": run.run_id})
    return [dict(row) for row in rows.mappings()]


def list_tracebacks(connection: Connection, run: Run, *, limit: int) -> list[dict[str, Any]]:
    """Return the most frequent tracebacks as plain data, each with its newest example."""
    rows = connection.execute(_TRACEBACKS, {"run_id": run.run_id, "limit": limit})
    return [
        {
            "error_class": row.error_class,
            "code": row.code,
            "attempts": row.attempts,
            "label": label_of(run.slug, row.group_no, row.rollout_index, row.attempt_no),
            "message": row.error_message,
            "traceback": row.error_detail,
        }
        for row in rows
    ]
