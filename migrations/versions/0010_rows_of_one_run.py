"""Add indexes by run: of open groups and of cancelled rollouts.

Without the indexes a pull from a finished run and a retry of cancelled rollouts read the rows of
every run. Few groups are open at a time, and few rollouts are cancelled, so the indexes stay small.

Revision ID: 0010
Revises: 0009
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the indexes; writers wait until they are built."""
    op.execute("CREATE INDEX groups_open ON groups (run_id) WHERE state = 'open'")
    op.execute("CREATE INDEX rollouts_cancelled ON rollouts (run_id) WHERE state = 'cancelled'")


def downgrade() -> None:
    """Drop the indexes."""
    op.execute("DROP INDEX groups_open, rollouts_cancelled")
