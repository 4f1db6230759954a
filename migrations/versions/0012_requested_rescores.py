"""Store each requested rescore in a row, from which the dispatcher publishes it.

Revision ID: 0012
Revises: 0011
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

DDL = """
CREATE TABLE rescores (
    rollout_id uuid NOT NULL,
    reward text NOT NULL,
    run_id uuid NOT NULL,
    queue text NOT NULL,
    -- A command waits for the verdict and deletes the row; else the verdict deletes it.
    awaited boolean NOT NULL,
    tries integer NOT NULL DEFAULT 0,
    lease_until timestamptz NOT NULL DEFAULT '-infinity',
    verdict text,
    reason text,
    PRIMARY KEY (rollout_id, reward)
);
CREATE INDEX rescores_run ON rescores (run_id, reward);
CREATE INDEX rescores_due ON rescores (lease_until) WHERE verdict IS NULL
"""


def upgrade() -> None:
    """Create the table; nothing is requested yet."""
    for statement in DDL.split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    """Drop the table; the command can be given again."""
    op.execute("DROP TABLE rescores")
