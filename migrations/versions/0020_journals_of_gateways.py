"""Number the calls in frames of gateways by the time of their answers.

Several gateways may answer for one attempt, and no gateway knows the calls that another recorded.

Revision ID: 0020
Revises: 0019
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Widen the column; the table holds only rollouts under way, so it is small."""
    op.execute("ALTER TABLE journals ALTER COLUMN first_call TYPE bigint")


def downgrade() -> None:
    """Delete the calls that gateways recorded, because their numbers do not fit."""
    op.execute("DELETE FROM journals WHERE first_call > 2147483647")
    op.execute("ALTER TABLE journals ALTER COLUMN first_call TYPE integer")
