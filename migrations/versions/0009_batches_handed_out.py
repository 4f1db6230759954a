"""Record when a train batch was handed to its trainer; its groups do not change from then on.

Revision ID: 0009
Revises: 0008
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; earlier batches were handed out when they were leased."""
    op.execute("ALTER TABLE train_batches ADD COLUMN handed_out_at timestamptz")
    op.execute("UPDATE train_batches SET handed_out_at = leased_at")


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE train_batches DROP COLUMN handed_out_at")
