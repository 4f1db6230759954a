"""Store the digest of each trajectory's body, so that readers detect another body under its URI.

Revision ID: 0008
Revises: 0007
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; NULL for earlier rows, whose bodies are not checked."""
    op.execute("ALTER TABLE trajectories ADD COLUMN body_digest text")


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE trajectories DROP COLUMN body_digest")
