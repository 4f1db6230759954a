"""The tracebacks that the attempts of a run ended with, grouped by equal call paths.

Used by `rollout errors --trace`. Reads only. The worker has redacted the tracebacks it sent.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from pipeline.contract.rollout import label_of
from pipeline.store.runs import Run

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
