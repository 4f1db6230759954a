"""Count how often a rollout's own process died while its worker lived.

Revision ID: 0011
Revises: 0010
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no rollout had a process of its own before."""
    op.execute("ALTER TABLE rollouts ADD COLUMN died_count integer NOT NULL DEFAULT 0")


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE rollouts DROP COLUMN died_count")
