"""Store the activity that workers report, and the working time of each run.

Revision ID: 0006
Revises: 0005
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

DDL = """
-- By run: model calls, failures, tool calls, as sums since the process started.
ALTER TABLE processes ADD COLUMN activity jsonb NOT NULL DEFAULT '{}';

-- Seconds that the run was worked on until `worked_at`.
ALTER TABLE runs ADD COLUMN worked_s double precision NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN worked_at timestamptz NOT NULL DEFAULT now();
-- Of earlier runs only their beginning and the end of their last rollout are known.
UPDATE runs SET worked_at = ended.at, worked_s = extract(epoch FROM ended.at - created_at)
FROM (
    SELECT run_id, greatest(max(last_finished_at), max(created_at)) AS at
    FROM runs LEFT JOIN rollout_tallies USING (run_id) GROUP BY run_id
) AS ended WHERE ended.run_id = runs.run_id
"""


def upgrade() -> None:
    """Add the columns; existing runs count as worked on from creation to their last outcome."""
    for statement in DDL.split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    """Drop the columns."""
    op.execute("ALTER TABLE processes DROP COLUMN activity")
    op.execute("ALTER TABLE runs DROP COLUMN worked_s, DROP COLUMN worked_at")
