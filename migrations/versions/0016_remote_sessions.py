"""Add the table of remote sessions, from the claim of their attempt to their stop.

Revision ID: 0016
Revises: 0014
"""

from alembic import op

revision = "0016"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table; no session exists yet."""
    op.execute(
        "CREATE TABLE remote_sessions ("
        " rollout_id uuid NOT NULL,"
        " attempt_no integer NOT NULL,"
        " run_id uuid NOT NULL,"
        # One service at a time stops a session.
        " stop_lease_until timestamptz NOT NULL DEFAULT '-infinity',"
        " PRIMARY KEY (rollout_id, attempt_no))"
    )
    op.execute("CREATE INDEX remote_sessions_run ON remote_sessions (run_id)")


def downgrade() -> None:
    """Drop the table; existing sessions end by their idle timeout."""
    op.execute("DROP TABLE remote_sessions")
