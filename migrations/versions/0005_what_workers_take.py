"""Store the queues of each worker, and the model endpoints that it may call.

Revision ID: 0005
Revises: 0004
"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; a worker that has not reported since has none."""
    op.execute("ALTER TABLE processes ADD COLUMN takes jsonb")


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE processes DROP COLUMN takes")
