"""Drop the table and the columns that no code reads.

`model_calls` was never written. The columns repeat the run's configuration, a rollout's state or
the members of a train batch; `attempts.retryable` repeats the next event of the rollout.

Revision ID: 0007
Revises: 0006
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

DOWN = """
CREATE TABLE model_calls (
    rollout_id uuid NOT NULL,
    attempt_no integer NOT NULL,
    sequence integer NOT NULL,
    prompt_token_ids bytea,
    completion_token_ids bytea,
    logprobs bytea,
    finish_reason text,
    policy_version integer,
    trainable boolean NOT NULL DEFAULT true,
    detail jsonb,
    PRIMARY KEY (rollout_id, attempt_no, sequence)
);
ALTER TABLE runs ADD COLUMN name text, ADD COLUMN purpose text, ADD COLUMN config_digest text,
    ADD COLUMN max_in_flight integer;
-- Earlier versions write the digest and never read it.
UPDATE runs SET name = slug, purpose = coalesce(config ->> 'purpose', 'train'), config_digest = '',
    max_in_flight = CAST(config ->> 'max_in_flight' AS integer);
ALTER TABLE runs ALTER COLUMN name SET NOT NULL, ALTER COLUMN purpose SET NOT NULL,
    ALTER COLUMN config_digest SET NOT NULL;
ALTER TABLE groups ADD COLUMN train_batch_id uuid;
UPDATE groups g SET train_batch_id = m.batch_id
FROM train_batch_groups m JOIN train_batches t USING (batch_id)
WHERE m.group_id = g.group_id AND t.state IN ('leased', 'committed');
ALTER TABLE rollouts ADD COLUMN timeout_s double precision,
    ADD COLUMN cancel_requested boolean NOT NULL DEFAULT false;
UPDATE rollouts r SET cancel_requested = r.state = 'cancelled',
    timeout_s = CAST(runs.config #>> '{limits,timeout_s}' AS double precision)
FROM runs WHERE runs.run_id = r.run_id;
ALTER TABLE attempts ADD COLUMN retryable boolean
"""


def upgrade() -> None:
    """Drop the table and the columns; no row is rewritten."""
    op.execute("DROP TABLE model_calls")
    op.execute(
        "ALTER TABLE runs DROP COLUMN name, DROP COLUMN purpose, DROP COLUMN config_digest,"
        " DROP COLUMN max_in_flight"
    )
    op.execute("ALTER TABLE groups DROP COLUMN train_batch_id")
    op.execute("ALTER TABLE rollouts DROP COLUMN timeout_s, DROP COLUMN cancel_requested")
    op.execute("ALTER TABLE attempts DROP COLUMN retryable")


def downgrade() -> None:
    """Add the columns again, with the values that follow from other columns."""
    for statement in DOWN.split(";\n"):
        op.execute(statement)
