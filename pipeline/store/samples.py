"""A few rollouts or groups of a run for reading, in the order of the groups.

Used by `rollout samples` and `rollout show run`. Reads only; whatever the size of the run, no more
rows are read than it takes to find as many as are wanted.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, text

from pipeline.store.engine import BINARY
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.runs import Run

# The attempt that won; of a rollout that failed, the last. Both joins follow an index in the order
# that is asked for, so the search ends with the last row that is wanted.
_SAMPLES = """
SELECT r.rollout_id, g.group_no, r.rollout_index, r.state, r.reward, r.stop_reason, r.error_class,
    r.error_code, a.attempt_no, a.error_message, a.n_turns, a.prompt_tokens, a.completion_tokens,
    p.payload, t.body, t.body_uri, t.codec
FROM groups g
JOIN rollouts r ON r.group_id = g.group_id
JOIN prompts p ON p.prompt_id = g.prompt_id
LEFT JOIN attempts a ON a.rollout_id = r.rollout_id
    AND a.attempt_no = coalesce(r.winner_attempt_no, r.attempt_no)
LEFT JOIN trajectories t ON t.rollout_id = a.rollout_id AND t.attempt_no = a.attempt_no
WHERE g.run_id = :run_id AND r.run_id = :run_id AND ({condition})
ORDER BY g.group_no, r.rollout_index LIMIT :limit
"""

_GROUPS = text("""
SELECT g.group_no, g.state, g.drop_reason, g.n_rollouts, g.n_succeeded, g.n_failed, g.n_cancelled,
       g.reward_mean, g.reward_std, p.payload
FROM groups g JOIN prompts p USING (prompt_id)
WHERE g.run_id = :run_id ORDER BY g.group_no LIMIT :limit
""")


def read_samples(
    connection: Connection, run: Run, where: RolloutFilter, *, limit: int
) -> list[Row[Any]]:
    """Return up to `limit` rollouts, each with its prompt's payload and where its body is."""
    query = text(_SAMPLES.format(condition=where.sql)).execution_options(**{BINARY: True})
    values = {"run_id": run.run_id, "limit": limit, **where.parameters}
    return list(connection.execute(query, values))


def list_groups(connection: Connection, run: Run, *, limit: int) -> list[dict[str, Any]]:
    """Return the first groups of a run as plain data."""
    rows = connection.execute(_GROUPS, {"run_id": run.run_id, "limit": limit})
    return [
        {
            "label": f"{run.slug}-g{row.group_no:06d}",
            "state": row.state,
            "drop_reason": row.drop_reason,
            "rollouts": row.n_rollouts,
            "succeeded": row.n_succeeded,
            "failed": row.n_failed,
            "cancelled": row.n_cancelled,
            "reward_mean": row.reward_mean,
            "reward_std": row.reward_std,
            "prompt": row.payload,
        }
        for row in rows
    ]
