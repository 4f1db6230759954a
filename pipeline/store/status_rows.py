"""The statements behind a run's status: all figures at one moment, or the state alone.

Used by `status.py`. Reads only.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from pipeline.store.processes import ALIVE_S
from pipeline.store.reward_error import STDERR

# Reads run counters and rows of partial indexes, so its time does not grow with the run.
_STATUS = """
WITH r AS (
    SELECT coalesce(sum(n), 0) AS total,
        coalesce(sum(n) FILTER (WHERE state = 'queued'), 0) AS queued,
        coalesce(sum(n) FILTER (WHERE state = 'dispatched'), 0) AS dispatched,
        coalesce(sum(n) FILTER (WHERE state = 'running'), 0) AS running,
        coalesce(sum(n) FILTER (WHERE state = 'succeeded'), 0) AS succeeded,
        coalesce(sum(n) FILTER (WHERE state = 'failed'), 0) AS failed,
        coalesce(sum(n) FILTER (WHERE state = 'cancelled'), 0) AS cancelled,
        coalesce(sum(n_rewarded), 0) AS reward_n, sum(reward_sum) AS reward_sum,
        coalesce(sum(n_with_tokens), 0) AS with_tokens,
        sum(reward_sum) / nullif(sum(n_rewarded), 0) AS reward_mean,
        -- The numerator is exact: a small spread of large rewards is not lost.
        sqrt(sum(n_rewarded) * sum(reward_squares) - sum(reward_sum) * sum(reward_sum))
            / nullif(sum(n_rewarded), 0) AS reward_std,
        max(last_finished_at) AS last_finished_at
    FROM rollout_tallies WHERE run_id = :run_id
), c AS ({prompt_sums}
), a AS (
    SELECT coalesce(sum(n), 0) AS attempts,
        coalesce(sum(n) FILTER (WHERE error_class IS NOT NULL), 0) AS failed_attempts,
        coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
        coalesce(sum(completion_tokens), 0) AS completion_tokens
    FROM attempt_tallies WHERE run_id = :run_id
), j AS (
    SELECT coalesce(sum(tokens_saved), 0) AS saved_tokens FROM attempts
    WHERE run_id = :run_id AND calls_replayed > 0
), g AS (
    SELECT coalesce(jsonb_agg(jsonb_build_array(state, drop_reason, n)), '[]') AS groups
    FROM (SELECT state, drop_reason, sum(n) AS n FROM group_tallies WHERE run_id = :run_id
          GROUP BY state, drop_reason HAVING sum(n) <> 0) AS counted
), e AS (
    SELECT coalesce(jsonb_object_agg(error_class, n), '{{}}') AS errors
    FROM (SELECT coalesce(error_class, 'unknown') AS error_class, sum(n) AS n FROM rollout_tallies
          WHERE run_id = :run_id AND state = 'failed' GROUP BY 1 HAVING sum(n) <> 0) AS counted
), s AS (
    SELECT coalesce(jsonb_agg(jsonb_build_array(name, scorer_version, n, mean)
                              ORDER BY name, scorer_version), '[]') AS scores
    FROM (SELECT name, scorer_version, sum(n) AS n, sum(value_sum) / sum(n) AS mean
          FROM score_tallies WHERE run_id = :run_id GROUP BY 1, 2) AS summed
), w AS (
    SELECT count(*) AS retry_waits, extract(epoch FROM min(not_before) - now()) AS next_retry_s
    FROM rollouts
    WHERE run_id = :run_id AND state = 'queued' AND attempt_no > 0 AND not_before > now()
), o AS (
    SELECT extract(epoch FROM now() - min(a.started_at)) AS oldest_running_s
    FROM rollouts r JOIN attempts a USING (rollout_id, attempt_no)
    WHERE r.run_id = :run_id AND r.state IN ('dispatched', 'running') AND a.state = 'running'
), p AS (
    SELECT count(*) FILTER (WHERE kind = 'worker' AND NOT stopping) AS live_workers,
        count(*) FILTER (WHERE kind = 'collector') AS live_collectors
    FROM processes WHERE last_seen_at > now() - make_interval(secs => :alive_s)
)
SELECT r.*, a.*, j.*, g.*, e.*, s.*, w.*, o.*, p.*,
    (SELECT version FROM policy_versions v WHERE v.run_id = runs.run_id
     AND v.version = runs.policy_version AND v.mode = 'pause') AS paused_version,
    coalesce(prompts, 0) AS reward_prompts,
    {stderr} AS reward_stderr, runs.state, runs.state_reason,
    runs.judged_finished, runs.judged_failed, runs.next_group_no,
    runs.sealed_at IS NOT NULL AS is_sealed,
    runs.worked_s, extract(epoch FROM now() - runs.worked_at) AS since_s,
    extract(epoch FROM r.last_finished_at - runs.worked_at) AS ended_s
FROM runs, r, c, a, j, g, e, s, w, o, p WHERE runs.run_id = :run_id
"""

# Cheap enough for a loop: both subqueries use partial indexes.
_STATE = text("""
SELECT state, sealed_at IS NOT NULL
    AND NOT EXISTS (SELECT FROM rollouts WHERE run_id = :run_id AND state = 'queued')
    AND NOT EXISTS (SELECT FROM rollouts WHERE run_id = :run_id
                    AND state IN ('dispatched', 'running')) AS is_done
FROM runs WHERE run_id = :run_id
""")


def read_figures(connection: Connection, run_id: UUID, sums: str) -> Row[Any]:
    """Return the figures of a run; `sums` is the subquery of its rewards by prompt."""
    query = text(_STATUS.format(prompt_sums=sums, stderr=STDERR))
    return connection.execute(query, {"run_id": run_id, "alive_s": ALIVE_S}).one()


def read_state(connection: Connection, run_id: UUID) -> Row[Any]:
    """Return a run's stored state, and whether all its rollouts are done."""
    return connection.execute(_STATE, {"run_id": run_id}).one()
