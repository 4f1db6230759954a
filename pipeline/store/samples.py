"""A few rollouts or groups of a run for reading, in the order of the groups.

Used by `rollout samples`, `show run` and `demo`. Reads only. The samples and groups that are read
depend on the limit and the condition, not on the size of the run.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.store.engine import BINARY
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.runs import Run


class Sample(NamedTuple):
    """A rollout with the attempt that won, or its last one, and the stored body of that attempt."""

    rollout_id: UUID
    group_no: int
    rollout_index: int
    state: str
    reward: float | None
    stop_reason: str | None
    error_class: str | None
    error_code: str | None
    attempt_no: int | None
    error_message: str | None
    n_turns: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    payload: dict[str, Any]
    body: bytes | None
    body_uri: str | None
    body_digest: str | None
    codec: str | None


# Both joins follow an index in the order of the result, so the search ends with the last row of the
# limit.
_SAMPLES = """
SELECT r.rollout_id, g.group_no, r.rollout_index, r.state, r.reward, r.stop_reason, r.error_class,
    r.error_code, a.attempt_no, a.error_message, a.n_turns, a.prompt_tokens, a.completion_tokens,
    p.payload, t.body, t.body_uri, t.body_digest, t.codec
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
SELECT CAST(:slug AS text) || '-g' || lpad(g.group_no::text, 6, '0') AS label, g.state,
       g.drop_reason, g.n_rollouts AS rollouts, g.n_succeeded AS succeeded, g.n_failed AS failed,
       g.n_cancelled AS cancelled, g.reward_mean, g.reward_std, p.payload AS prompt
FROM groups g JOIN prompts p USING (prompt_id)
WHERE g.run_id = :run_id ORDER BY g.group_no LIMIT :limit
""")

_CORRECT = text("""
SELECT count(*), count(*) FILTER (WHERE reward >= 1)
FROM rollouts WHERE run_id = :run_id GROUP BY group_id
""")


def read_samples(
    connection: Connection, run: Run, where: RolloutFilter, *, limit: int
) -> list[Sample]:
    """Return up to `limit` rollouts that fulfil a condition."""
    query = text(_SAMPLES.format(condition=where.sql)).execution_options(**{BINARY: True})
    values = {"run_id": run.run_id, "limit": limit, **where.parameters}
    return [Sample(*row) for row in connection.execute(query, values)]


def list_groups(connection: Connection, run: Run, *, limit: int) -> list[dict[str, Any]]:
    """Return the first groups of a run as plain data."""
    values = {"run_id": run.run_id, "slug": run.slug, "limit": limit}
    return [dict(row) for row in connection.execute(_GROUPS, values).mappings()]


def count_correct(connection: Connection, run: Run) -> list[tuple[int, int]]:
    """Return for each group its rollouts, and how many of them have a reward of 1 or more."""
    rows = connection.execute(_CORRECT, {"run_id": run.run_id})
    return [(n, n_correct) for n, n_correct in rows]
