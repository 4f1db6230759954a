"""Journals: model calls of running attempts, which the next attempt replays.

Revision ID: 0018
Revises: 0017
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

DDL = """
CREATE TABLE journals (
    rollout_id uuid NOT NULL,
    attempt_no integer NOT NULL,
    first_call integer NOT NULL,
    run_id uuid NOT NULL,
    n_calls integer NOT NULL,
    body bytea,
    body_uri text,
    body_digest text,
    body_bytes bigint NOT NULL,
    PRIMARY KEY (rollout_id, attempt_no, first_call)
);
-- Rows live as long as their rollout: keep the dead ones few.
ALTER TABLE journals SET (autovacuum_vacuum_scale_factor = 0.1,
    toast.autovacuum_vacuum_scale_factor = 0.1);
ALTER TABLE attempts ADD COLUMN calls_replayed integer, ADD COLUMN replayed_from integer[],
    ADD COLUMN tokens_saved bigint;
-- Few attempts replay calls, and the status of a run sums what they saved.
CREATE INDEX attempts_replayed ON attempts (run_id) INCLUDE (calls_replayed, tokens_saved)
    WHERE calls_replayed > 0
"""


def upgrade() -> None:
    """Create the table and the columns; no row is rewritten."""
    for statement in DDL.split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    """Drop the table and the columns; attempts replay no calls any more."""
    op.execute("DROP INDEX attempts_replayed")
    op.execute(
        "ALTER TABLE attempts DROP COLUMN calls_replayed, DROP COLUMN replayed_from,"
        " DROP COLUMN tokens_saved"
    )
    op.execute("DROP TABLE journals")
