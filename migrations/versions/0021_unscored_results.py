"""Name the attempt of a rollout whose trajectory waits for its reward.

A remote session leaves a trajectory, and a worker scores it in a later attempt.

Revision ID: 0021
Revises: 0020
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; it is NULL for all rollouts so far, so no row is rewritten."""
    op.execute("ALTER TABLE rollouts ADD COLUMN unscored_no integer")


def downgrade() -> None:
    """Drop the column; rollouts whose trajectory waits for a reward get a new session."""
    op.execute("ALTER TABLE rollouts DROP COLUMN unscored_no")
