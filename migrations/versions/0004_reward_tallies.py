"""Add the sums for the standard error of a run's mean reward, and for the mean of every reward.

Revision ID: 0004
Revises: 0003
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = """
-- Over the groups that have rewards, n of them with the sum s: how many groups there are, and the
-- sums of s * s, s * n and n * n.
CREATE TABLE reward_tallies (
    run_id uuid NOT NULL,
    n_groups bigint NOT NULL,
    sum_squares numeric NOT NULL,
    sum_products numeric NOT NULL,
    count_squares numeric NOT NULL
);
-- Values of each reward of a run, its parts and those of rescored trajectories included. Written
-- with the rewards themselves, which name no run.
CREATE TABLE score_tallies (
    run_id uuid NOT NULL,
    name text NOT NULL,
    scorer_version text NOT NULL,
    n bigint NOT NULL,
    value_sum numeric NOT NULL
);
CREATE INDEX reward_tallies_run ON reward_tallies (run_id);
CREATE INDEX score_tallies_run ON score_tallies (run_id);
ALTER TABLE reward_tallies SET (autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.5);
ALTER TABLE score_tallies SET (autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.5);
-- Says at once whether a run may have asked for the same dataset row more than once.
CREATE INDEX prompts_of_later_epochs ON prompts (run_id) WHERE epoch > 0
"""

# Writers of rewards hold the lock of the group, so no other reward of the group changes meanwhile.
# The look-up per group must not become a scan of all rollouts while the table has no statistics.
FUNCTION = """
CREATE FUNCTION tally_rewards() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN {added};
    ELSIF TG_OP = 'DELETE' THEN {removed};
    ELSE {both};
    END IF;
    RETURN NULL;
END $$
"""
INSERT = """
INSERT INTO reward_tallies
SELECT run_id, sum((n > 0)::integer - (n > more_n)::integer),
    sum(s * s - (s - more_s) * (s - more_s)), sum(s * n - (s - more_s) * (n - more_n)),
    sum(n * n - (n - more_n) * (n - more_n))
FROM (SELECT run_id, group_id, sum(sign) AS more_n, sum(sign * reward::numeric) AS more_s
      FROM ({changes}) AS c WHERE reward IS NOT NULL GROUP BY run_id, group_id
      HAVING (sum(sign), sum(sign * reward::numeric)) <> (0, 0)) AS changed
CROSS JOIN LATERAL (
    SELECT count(reward) AS n, coalesce(sum(reward::numeric), 0) AS s
    FROM rollouts r WHERE r.group_id = changed.group_id) AS whole
GROUP BY run_id
"""
ADDED = "SELECT 1 AS sign, run_id, group_id, reward FROM added"
REMOVED = "SELECT -1 AS sign, run_id, group_id, reward FROM removed"
SEEN_BY = {
    "INSERT": "NEW TABLE AS added",
    "UPDATE": "OLD TABLE AS removed NEW TABLE AS added",
    "DELETE": "OLD TABLE AS removed",
}


def upgrade() -> None:
    """Create the sums and their triggers, and count the existing rewards."""
    for statement in TABLES.split(";\n"):
        op.execute(statement)
    changes = {"added": ADDED, "removed": REMOVED, "both": f"{ADDED} UNION ALL {REMOVED}"}
    op.execute(
        FUNCTION.format(**{name: INSERT.format(changes=rows) for name, rows in changes.items()})
    )
    for operation, seen in SEEN_BY.items():
        op.execute(
            f"CREATE TRIGGER tally_rewards_{operation.lower()} AFTER {operation} ON rollouts"
            f" REFERENCING {seen} FOR EACH STATEMENT EXECUTE FUNCTION tally_rewards()"
        )
    op.execute(
        "INSERT INTO reward_tallies SELECT run_id, count(*), sum(s * s), sum(s * n), sum(n * n)"
        " FROM (SELECT run_id, count(reward) AS n, sum(reward::numeric) AS s FROM rollouts"
        " WHERE reward IS NOT NULL GROUP BY run_id, group_id) AS groups GROUP BY run_id"
    )
    op.execute(
        "INSERT INTO score_tallies SELECT run_id, name, scorer_version, count(*),"
        " sum(value::numeric) FROM rewards JOIN rollouts USING (rollout_id)"
        " WHERE value IS NOT NULL GROUP BY run_id, name, scorer_version"
    )


def downgrade() -> None:
    """Drop the sums and their triggers."""
    op.execute("DROP FUNCTION tally_rewards CASCADE")
    op.execute("DROP TABLE reward_tallies, score_tallies")
    op.execute("DROP INDEX prompts_of_later_epochs")
