"""Add published policies, and the indexes for staleness, variance and admission.

The table `policy_versions` was empty until now. Open groups are counted up to a group
number, so that number is the second column of their index.

Revision ID: 0017
Revises: 0016
"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE policy_versions DROP COLUMN model, ADD COLUMN mode text NOT NULL DEFAULT 'keep',
    ADD COLUMN serial integer NOT NULL DEFAULT 1;
DROP INDEX groups_open;
CREATE INDEX groups_open ON groups (run_id, group_no) WHERE state = 'open';
CREATE INDEX groups_without_variance ON groups (run_id) WHERE state = 'ready' AND reward_std = 0;
CREATE INDEX groups_dropped_for_variance ON groups (run_id, reward_mean)
    WHERE drop_reason = 'zero_variance';
CREATE INDEX train_batches_leased ON train_batches (run_id, consumer, trainer_step)
    WHERE state = 'leased';
CREATE INDEX train_batches_newest ON train_batches (run_id, leased_at)
"""

DOWNGRADE = """
DROP INDEX groups_without_variance, groups_dropped_for_variance, train_batches_leased,
    train_batches_newest, groups_open;
CREATE INDEX groups_open ON groups (run_id) WHERE state = 'open';
ALTER TABLE policy_versions ADD COLUMN model text, DROP COLUMN mode, DROP COLUMN serial
"""


def upgrade() -> None:
    """Add the columns and indexes; writers wait until the indexes are built."""
    for statement in UPGRADE.split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    """Drop the columns and indexes; the published versions stay."""
    for statement in DOWNGRADE.split(";\n"):
        op.execute(statement)
