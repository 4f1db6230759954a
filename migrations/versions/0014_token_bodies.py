"""Store the tokens of each trajectory in a body of their own, which trainers read alone.

Revision ID: 0014
Revises: 0013
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; earlier rows have no tokens."""
    op.execute(
        "ALTER TABLE trajectories ADD COLUMN tokens bytea, ADD COLUMN tokens_uri text,"
        " ADD COLUMN tokens_digest text, ADD COLUMN tokens_bytes bigint"
    )
    # The worker has compressed the tokens: Postgres need not try again.
    op.execute("ALTER TABLE trajectories ALTER COLUMN tokens SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Drop the columns; objects in the payload store stay until their run is removed."""
    op.execute(
        "ALTER TABLE trajectories DROP COLUMN tokens, DROP COLUMN tokens_uri,"
        " DROP COLUMN tokens_digest, DROP COLUMN tokens_bytes"
    )
