"""Markers of collectors, from which the watermark follows.

A collector sends markers through its own queues. The watermark is the time of the newest marker
that was read, so it advances also while the queues are never empty.

Revision ID: 0013
Revises: 0012
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table; collectors add their columns with their next report."""
    op.execute(
        "CREATE TABLE markers ("
        " queue text NOT NULL,"
        " sent_at timestamptz NOT NULL,"
        " collector_id text NOT NULL,"
        " read_at timestamptz,"
        " read_by text,"
        " PRIMARY KEY (queue, sent_at, collector_id))"
    )
    op.execute(
        "ALTER TABLE processes ADD COLUMN committed_up_to timestamptz,"
        " ADD COLUMN markers_from timestamptz"
    )
    # Collectors of the version before hold an unknown number of messages. They are stopped for
    # the upgrade, and one that crashed must not be waited for.
    op.execute("DELETE FROM processes WHERE kind = 'collector'")


def downgrade() -> None:
    """Drop the markers; collectors report their watermark again within seconds."""
    op.execute("DROP TABLE markers")
    op.execute("ALTER TABLE processes DROP COLUMN committed_up_to, DROP COLUMN markers_from")
