"""Run counters: how many rollouts, groups, attempts and scores a run has per key, and their sums.

Triggers insert a row for every key that a statement changed, so no writer can forget a counter and
writers do not lock each other's rows; readers sum the rows. `score_tallies` alone is written by
code, in `outcome_rows.py`. The reconciler folds the rows, `accounting.py` compares them with the
rows they count. Must not: count anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, text

#: An advisory lock; nothing else in the database uses this number.
_FOLD_LOCK = 7_214_002
#: Rows of a run below which folding gains nothing.
_FEW = 200


class _Counters(NamedTuple):
    """A counter table: its key, its sums, and the rows that each sum is taken over."""

    table: str
    keys: str
    sums: Mapping[str, str]  #: by column, the expression over `rows` that gives its value
    rows: str
    highest: str = ""  #: a column of which folding keeps the maximum


_COUNTERS = (
    _Counters(
        "rollout_tallies",
        "run_id, state, error_class, error_code",
        {
            "n": "count(*)",
            "n_rewarded": "count(reward)",
            "reward_sum": "sum(reward::numeric)",
            "reward_squares": "sum(reward::numeric * reward::numeric)",
            "n_with_tokens": "count(*) FILTER (WHERE has_tokens)",
        },
        "rollouts",
        highest="last_finished_at",
    ),
    _Counters(
        "group_tallies",
        "run_id, state, drop_reason",
        {"n": "count(*)", "n_rollouts": "sum(n_rollouts)", "n_cut": "sum(n_cut)"},
        "groups",
    ),
    _Counters(
        "reward_tallies",
        "run_id",
        {
            "n_groups": "count(*)",
            "sum_squares": "sum(s * s)",
            "sum_products": "sum(s * n)",
            "count_squares": "sum(n * n)",
        },
        "(SELECT run_id, count(reward) AS n, sum(reward::numeric) AS s FROM rollouts"
        " WHERE reward IS NOT NULL GROUP BY run_id, group_id) AS by_group",
    ),
    _Counters(
        "score_tallies",
        "run_id, name, scorer_version",
        {"n": "count(*)", "value_sum": "sum(value::numeric)"},
        "(SELECT run_id, name, scorer_version, value FROM rewards JOIN rollouts USING (rollout_id)"
        " WHERE value IS NOT NULL) AS scored",
    ),
    _Counters(
        "attempt_tallies",
        "run_id, worker_id, error_class, error_code",
        {
            "n": "count(*)",
            "prompt_tokens": "sum(prompt_tokens)",
            "completion_tokens": "sum(completion_tokens)",
        },
        "attempts",
    ),
)

_WAIT_LOCK = text("SELECT pg_advisory_xact_lock(:key)")

_TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:key)")

# Only where most rows repeat a key: a run with many workers has many keys, and keeps their rows.
_FOLD = """
WITH crowded AS (
    SELECT run_id FROM {table} GROUP BY run_id
    HAVING count(*) > :few AND count(*) > 2 * count(DISTINCT ({keys}))
), folded AS (
    DELETE FROM {table} t USING crowded WHERE t.run_id = crowded.run_id RETURNING t.*
)
INSERT INTO {table} ({keys}, {columns}) SELECT {keys}, {values} FROM folded GROUP BY {keys}
HAVING ({sums}) <> ({zeros})
"""

_RULE = """
SELECT format('%s: counters (%s), rows (%s)', key, c.sums, r.sums)
FROM (SELECT ({keys})::text AS key, concat_ws(', ', {sums}) AS sums FROM {table}
      WHERE run_id = :run_id GROUP BY {keys} HAVING ({sums}) <> ({zeros})) AS c
FULL JOIN (SELECT ({keys})::text AS key, concat_ws(', ', {counted}) AS sums FROM {rows}
           WHERE run_id = :run_id GROUP BY {keys}) AS r USING (key)
WHERE c.sums IS DISTINCT FROM r.sums
"""


def fold_run_counters(connection: Connection) -> int:
    """Replace the rows that repeat a key by one row each; return how many rows these are.

    The sums stay the same, also for concurrent readers and writers.
    """
    if not connection.execute(_TRY_LOCK, {"key": _FOLD_LOCK}).scalar_one():
        return 0
    return sum(connection.execute(text(_fold(c)), {"few": _FEW}).rowcount for c in _COUNTERS)


def stop_folding(connection: Connection) -> None:
    """Keep counters from being folded until the end of a transaction that deletes some."""
    connection.execute(_WAIT_LOCK, {"key": _FOLD_LOCK})


def _fold(counters: _Counters) -> str:
    highest = [counters.highest] if counters.highest else []
    sums = [f"sum({name})" for name in counters.sums]
    return _FOLD.format(
        table=counters.table,
        keys=counters.keys,
        columns=", ".join([*counters.sums, *highest]),
        values=", ".join([*sums, *(f"max({name})" for name in highest)]),
        sums=", ".join(sums),
        zeros=", ".join("0" for _ in sums),
    )


def _rule(counters: _Counters) -> str:
    return _RULE.format(
        table=counters.table,
        rows=counters.rows,
        keys=counters.keys,
        sums=", ".join(f"trim_scale(sum({name}))" for name in counters.sums),
        counted=", ".join(f"trim_scale(coalesce({sum_}, 0))" for sum_ in counters.sums.values()),
        zeros=", ".join("0" for _ in counters.sums),
    )


#: Each query returns one sentence for each key whose counters differ from its rows.
COUNTER_RULES = {f"{each.table} equal their rows": _rule(each) for each in _COUNTERS}
