"""Add the run counters, and the indexes of frequent look-ups.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

#: By table: the key of its counters, and the sums over its rows.
TALLIED = {
    "rollouts": (
        ("run_id", "state", "error_class", "error_code"),
        {
            "n": "1",
            "n_rewarded": "(reward IS NOT NULL)::integer",
            # Numeric sums are exact: what is taken away again leaves nothing behind.
            "reward_sum": "coalesce(reward, 0)::numeric",
            "reward_squares": "coalesce(reward, 0)::numeric * coalesce(reward, 0)::numeric",
        },
    ),
    "groups": (
        ("run_id", "state", "drop_reason"),
        {"n": "1", "n_rollouts": "n_rollouts", "n_cut": "n_cut"},
    ),
    "attempts": (
        ("run_id", "worker_id", "error_class", "error_code"),
        {
            "n": "1",
            "prompt_tokens": "coalesce(prompt_tokens, 0)",
            "completion_tokens": "coalesce(completion_tokens, 0)",
        },
    ),
}

TABLES = """
ALTER TABLE rollouts ADD COLUMN error_code text;
UPDATE rollouts r SET error_code = a.error_code FROM attempts a
    WHERE r.state = 'failed' AND a.rollout_id = r.rollout_id AND a.attempt_no = r.attempt_no;

CREATE TABLE rollout_tallies (
    run_id uuid NOT NULL,
    state text NOT NULL,
    error_class text,
    error_code text,
    n bigint NOT NULL,
    n_rewarded bigint NOT NULL,
    reward_sum numeric NOT NULL,
    reward_squares numeric NOT NULL,
    last_finished_at timestamptz
);
CREATE TABLE group_tallies (
    run_id uuid NOT NULL,
    state text NOT NULL,
    drop_reason text,
    n bigint NOT NULL,
    n_rollouts bigint NOT NULL,
    n_cut bigint NOT NULL
);
CREATE TABLE attempt_tallies (
    run_id uuid NOT NULL,
    worker_id text,
    error_class text,
    error_code text,
    n bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL
);

-- Few are queued for another try; what waits for one is looked for among them only.
CREATE INDEX rollouts_retried ON rollouts (run_id, not_before)
    WHERE state = 'queued' AND attempt_no > 0;
-- The newest example of each error.
CREATE INDEX attempts_failed ON attempts
    (run_id, error_class, (coalesce(error_code, '')), ended_at) WHERE error_class IS NOT NULL
"""

# One row per key that changed, so that concurrent writers do not lock each other's rows.
FUNCTION = """
CREATE FUNCTION tally_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN {insert} FROM (SELECT 1 AS sign, * FROM added) AS c {grouped};
    ELSIF TG_OP = 'DELETE' THEN {insert} FROM (SELECT -1 AS sign, * FROM removed) AS c {grouped};
    ELSE {insert} FROM (
            SELECT 1 AS sign, * FROM added UNION ALL SELECT -1, * FROM removed) AS c {grouped};
    END IF;
    RETURN NULL;
END $$
"""
SEEN_BY = {
    "INSERT": "NEW TABLE AS added",
    "UPDATE": "OLD TABLE AS removed NEW TABLE AS added",
    "DELETE": "OLD TABLE AS removed",
}


def upgrade() -> None:
    """Create the counters and their triggers, and count the existing rows."""
    for statement in TABLES.split(";\n"):
        op.execute(statement)
    for table, (keys, amounts) in TALLIED.items():
        tallies = f"{table.removesuffix('s')}_tallies"
        op.execute(f"CREATE INDEX {tallies}_run ON {tallies} (run_id)")
        # Rows are added and folded often, so autovacuum must remove dead rows early.
        op.execute(
            f"ALTER TABLE {tallies} SET (autovacuum_vacuum_scale_factor = 0.1,"
            " autovacuum_analyze_scale_factor = 0.5)"
        )
        sums = {name: f"sum(sign * {amount})" for name, amount in amounts.items()}
        columns, values = [*keys, *sums], [*keys, *sums.values()]
        if table == "rollouts":
            columns.append("last_finished_at")
            values.append("max(finished_at) FILTER (WHERE sign > 0)")
        insert = f"INSERT INTO {tallies} ({', '.join(columns)}) SELECT {', '.join(values)}"
        changed = f"({', '.join(sums.values())}) <> ({', '.join('0' for _ in sums)})"
        grouped = f"GROUP BY {', '.join(keys)} HAVING {changed}"
        op.execute(FUNCTION.format(table=table, insert=insert, grouped=grouped))
        for operation, seen in SEEN_BY.items():
            op.execute(
                f"CREATE TRIGGER tally_{operation.lower()} AFTER {operation} ON {table}"
                f" REFERENCING {seen} FOR EACH STATEMENT EXECUTE FUNCTION tally_{table}()"
            )
        op.execute(f"{insert} FROM (SELECT 1 AS sign, * FROM {table}) AS c {grouped}")


def downgrade() -> None:
    """Drop the counters and their triggers."""
    for table in TALLIED:
        op.execute(f"DROP FUNCTION tally_{table} CASCADE")
        op.execute(f"DROP TABLE {table.removesuffix('s')}_tallies")
    op.execute("DROP INDEX attempts_failed, rollouts_retried")
    op.execute("ALTER TABLE rollouts DROP COLUMN error_code")
