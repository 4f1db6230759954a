"""The rollouts of a run as an export writes them: all columns of each, group after group.

Used by `pipeline/trainer/export.py`. Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from pipeline.store.engine import BINARY

# The attempt that won; of a rollout that failed, the last.
_ROWS = text("""
SELECT r.rollout_id::text, r.group_id::text, r.group_no AS "group", r.rollout_index AS "index",
    r.state, r.reward, r.stop_reason, r.error_class, r.attempt_no AS attempts, r.finished_at,
    a.attempt_no, a.error_code, a.error_message, a.phase AS error_phase, a.n_turns,
    a.prompt_tokens, a.completion_tokens, a.version_min, a.version_max,
    CAST(a.timings ->> 'elapsed_s' AS double precision) AS latency_s,
    p.prompt_id::text, p.dataset, p.split, p.epoch, p.row_no AS "row", p.payload AS prompt,
    s.rewards, t.body, t.body_uri, t.body_digest, t.codec
FROM groups g
JOIN prompts p USING (prompt_id)
JOIN rollouts r ON r.group_id = g.group_id
LEFT JOIN attempts a ON a.rollout_id = r.rollout_id
    AND a.attempt_no = coalesce(r.winner_attempt_no, r.attempt_no)
LEFT JOIN trajectories t ON t.rollout_id = a.rollout_id AND t.attempt_no = a.attempt_no
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_agg(jsonb_build_object(
        'name', name, 'version', scorer_version, 'value', value, 'weight', weight,
        'status', status, 'error_class', w.error_class, 'latency_ms', latency_ms)
        ORDER BY name, scorer_version), '[]') AS rewards
    FROM rewards w WHERE w.rollout_id = a.rollout_id AND w.attempt_no = a.attempt_no) AS s
WHERE g.run_id = :run_id AND g.group_no >= :first AND g.group_no < :end
ORDER BY g.group_no, r.rollout_index
""").execution_options(**{BINARY: True})


def read_exported(connection: Connection, run_id: UUID, first: int, end: int) -> Sequence[Row[Any]]:
    """Return the rollouts of the groups from number `first` to `end`, each with its body."""
    values = {"run_id": run_id, "first": first, "end": end}
    return connection.execute(_ROWS, values).all()
