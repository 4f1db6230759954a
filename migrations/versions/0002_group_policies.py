"""Allow more rollouts in a group than it needs, and count the errors of runs.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DDL = """
-- n_target is what a trainer counts as full; n_rollouts is how many there are to reach it.
ALTER TABLE groups ADD COLUMN n_rollouts integer;
UPDATE groups SET n_rollouts = n_target;
ALTER TABLE groups ALTER COLUMN n_rollouts SET NOT NULL;
-- Of the cancelled ones, those that were not needed or not done in time.
ALTER TABLE groups ADD COLUMN n_cut integer NOT NULL DEFAULT 0;
ALTER TABLE groups DROP CONSTRAINT groups_counters;
ALTER TABLE groups ADD CONSTRAINT groups_counters
    CHECK (n_succeeded + n_failed + n_cancelled <= n_rollouts AND n_cut <= n_cancelled);
CREATE INDEX groups_deadline ON groups (deadline_at)
    WHERE state = 'open' AND deadline_at IS NOT NULL;

-- Rollouts that ended since the run was last started, for `max_error_rate`.
ALTER TABLE runs ADD COLUMN judged_finished integer NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN judged_failed integer NOT NULL DEFAULT 0
"""


def upgrade() -> None:
    """Add the columns; existing groups have exactly the rollouts they need."""
    for statement in DDL.split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    """Drop the columns; fails if a group has more rollouts than it needs."""
    op.execute("DROP INDEX groups_deadline")
    op.execute("ALTER TABLE groups DROP CONSTRAINT groups_counters")
    op.execute(
        "ALTER TABLE groups DROP COLUMN n_rollouts, DROP COLUMN n_cut, ADD CONSTRAINT "
        "groups_counters CHECK (n_succeeded + n_failed + n_cancelled <= n_target)"
    )
    op.execute("ALTER TABLE runs DROP COLUMN judged_finished, DROP COLUMN judged_failed")
