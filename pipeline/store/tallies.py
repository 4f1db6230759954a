"""Tallies: how many rollouts, groups and attempts of a run have which key, and what they sum up to.

Triggers of the database add a row for every key that a statement changed, so no writer can forget
one and none waits for another; readers sum the rows. Only `score_tallies` are written with their
rows, by `outcome_rows.py`. Used by the reconciler, which folds them, and
by `accounting.py`, which holds them against what they count. Must not: count anything itself.
"""

from __future__ import annotations

from sqlalchemy import Connection, Table, text

from pipeline.store.tables import (
    attempt_tallies,
    group_tallies,
    reward_tallies,
    rollout_tallies,
    score_tallies,
)

#: Any number that nothing else in the database locks by.
_FOLD_LOCK = 7_214_002
#: Rows of a run below which folding gains nothing.
_FEW = 200

#: By tallies: the sums, and what is the highest of its rows instead; all else is the key.
_SUMS = {
    rollout_tallies: ("n", "n_rewarded", "reward_sum", "reward_squares"),
    group_tallies: ("n", "n_rollouts", "n_cut"),
    reward_tallies: ("n_groups", "sum_squares", "sum_products", "count_squares"),
    score_tallies: ("n", "value_sum"),
    attempt_tallies: ("n", "prompt_tokens", "completion_tokens"),
}
_HIGHEST = frozenset({"last_finished_at"})

# Only where most rows are repeats: a run with many workers has many keys, and keeps them.
_FOLD = """
WITH crowded AS (
    SELECT run_id FROM {tallies} GROUP BY run_id
    HAVING count(*) > :few AND count(*) > 2 * count(DISTINCT ({keys}))
), folded AS (
    DELETE FROM {tallies} t USING crowded WHERE t.run_id = crowded.run_id RETURNING t.*
)
INSERT INTO {tallies} ({keys}, {values}) SELECT {keys}, {aggregates} FROM folded GROUP BY {keys}
HAVING ({sums}) <> ({zeros})
"""


def fold_tallies(connection: Connection) -> int:
    """Make one row of the many that say the same key; return how many rows are left of those.

    The sums stay what they are, also for whoever reads or adds meanwhile.
    """
    lock = text("SELECT pg_try_advisory_xact_lock(:key)")
    if not connection.execute(lock, {"key": _FOLD_LOCK}).scalar_one():
        return 0
    return sum(connection.execute(text(_fold(t)), {"few": _FEW}).rowcount for t in _SUMS)


def _fold(tallies: Table) -> str:
    sums = [f"sum({name})" for name in _SUMS[tallies]]
    highest = [column.name for column in tallies.columns if column.name in _HIGHEST]
    valued = {*_SUMS[tallies], *highest}
    return _FOLD.format(
        tallies=tallies.name,
        keys=", ".join(column.name for column in tallies.columns if column.name not in valued),
        values=", ".join([*_SUMS[tallies], *highest]),
        aggregates=", ".join([*sums, *(f"max({name})" for name in highest)]),
        sums=", ".join(sums),
        zeros=", ".join("0" for _ in sums),
    )


#: Each query returns one sentence for each key whose tallies are not what its rows add up to.
TALLY_RULES = {
    "tallies of rollouts equal their rows": """
        SELECT format('%s %s %s: tallies (%s), rows (%s)', state, error_class, error_code, t.sums,
                      r.sums)
        FROM (SELECT state, coalesce(error_class, '-') AS error_class,
                     coalesce(error_code, '-') AS error_code,
                     (sum(n), sum(n_rewarded), trim_scale(sum(reward_sum)),
                      trim_scale(sum(reward_squares)))::text AS sums
              FROM rollout_tallies WHERE run_id = :run_id GROUP BY 1, 2, 3 HAVING sum(n) <> 0) AS t
        FULL JOIN (SELECT state, coalesce(error_class, '-') AS error_class,
                     coalesce(error_code, '-') AS error_code,
                     (count(*), count(reward), trim_scale(coalesce(sum(reward::numeric), 0)),
                      trim_scale(coalesce(sum(reward::numeric * reward::numeric), 0)))::text AS sums
              FROM rollouts WHERE run_id = :run_id GROUP BY 1, 2, 3) AS r
        USING (state, error_class, error_code) WHERE t.sums IS DISTINCT FROM r.sums""",
    "tallies of groups equal their rows": """
        SELECT format('%s %s: tallies (%s), rows (%s)', state, drop_reason, t.sums, r.sums)
        FROM (SELECT state, coalesce(drop_reason, '-') AS drop_reason,
                     (sum(n), sum(n_rollouts), sum(n_cut))::text AS sums
              FROM group_tallies WHERE run_id = :run_id GROUP BY 1, 2 HAVING sum(n) <> 0) AS t
        FULL JOIN (SELECT state, coalesce(drop_reason, '-') AS drop_reason,
                     (count(*), sum(n_rollouts), sum(n_cut))::text AS sums
              FROM groups WHERE run_id = :run_id GROUP BY 1, 2) AS r
        USING (state, drop_reason) WHERE t.sums IS DISTINCT FROM r.sums""",
    "tallies of rewards equal their rows": """
        SELECT format('tallies (%s), rows (%s)', t.sums, r.sums)
        FROM (SELECT (coalesce(sum(n_groups), 0), trim_scale(coalesce(sum(sum_squares), 0)),
                      trim_scale(coalesce(sum(sum_products), 0)),
                      coalesce(sum(count_squares), 0))::text AS sums
              FROM reward_tallies WHERE run_id = :run_id) AS t
        CROSS JOIN (SELECT (count(*), trim_scale(coalesce(sum(s * s), 0)),
                            trim_scale(coalesce(sum(s * n), 0)), coalesce(sum(n * n), 0))::text
                           AS sums
                    FROM (SELECT count(reward) AS n, sum(reward::numeric) AS s FROM rollouts
                          WHERE run_id = :run_id AND reward IS NOT NULL GROUP BY group_id) AS g
                   ) AS r
        WHERE t.sums <> r.sums""",
    "tallies of scores equal their rows": """
        SELECT format('%s version %s: tallies (%s), rows (%s)', name, scorer_version, t.sums,
                      r.sums)
        FROM (SELECT name, scorer_version, (sum(n), trim_scale(sum(value_sum)))::text AS sums
              FROM score_tallies WHERE run_id = :run_id GROUP BY 1, 2) AS t
        FULL JOIN (SELECT name, scorer_version,
                          (count(*), trim_scale(sum(value::numeric)))::text AS sums
                   FROM rewards JOIN rollouts USING (rollout_id)
                   WHERE run_id = :run_id AND value IS NOT NULL GROUP BY 1, 2) AS r
        USING (name, scorer_version) WHERE t.sums IS DISTINCT FROM r.sums""",
    "tallies of attempts equal their rows": """
        SELECT format('%s %s %s: tallies (%s), rows (%s)', worker_id, error_class, error_code,
                      t.sums, r.sums)
        FROM (SELECT coalesce(worker_id, '-') AS worker_id, coalesce(error_class, '-')
                     AS error_class, coalesce(error_code, '-') AS error_code,
                     (sum(n), sum(prompt_tokens), sum(completion_tokens))::text AS sums
              FROM attempt_tallies WHERE run_id = :run_id GROUP BY 1, 2, 3 HAVING sum(n) <> 0) AS t
        FULL JOIN (SELECT coalesce(worker_id, '-') AS worker_id, coalesce(error_class, '-')
                     AS error_class, coalesce(error_code, '-') AS error_code,
                     (count(*), coalesce(sum(prompt_tokens), 0),
                      coalesce(sum(completion_tokens), 0))::text AS sums
              FROM attempts WHERE run_id = :run_id GROUP BY 1, 2, 3) AS r
        USING (worker_id, error_class, error_code) WHERE t.sums IS DISTINCT FROM r.sums""",
}
