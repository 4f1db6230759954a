"""Count the rollouts whose trajectory has token ids, among the run counters.

Revision ID: 0019
Revises: 0018
"""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_KEYS = "run_id, state, error_class, error_code"
_SUMS = {
    "n": "sum(sign)",
    "n_rewarded": "sum(sign * (reward IS NOT NULL)::integer)",
    "reward_sum": "sum(sign * coalesce(reward, 0)::numeric)",
    "reward_squares": "sum(sign * coalesce(reward, 0)::numeric * coalesce(reward, 0)::numeric)",
}
_WITH_TOKENS = {"n_with_tokens": "sum(sign * has_tokens::integer)"}

#: The function of revision 0003, with other sums.
_FUNCTION = """
CREATE OR REPLACE FUNCTION tally_rollouts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN {insert} FROM (SELECT 1 AS sign, * FROM added) AS c {grouped};
    ELSIF TG_OP = 'DELETE' THEN {insert} FROM (SELECT -1 AS sign, * FROM removed) AS c {grouped};
    ELSE {insert} FROM (
            SELECT 1 AS sign, * FROM added UNION ALL SELECT -1, * FROM removed) AS c {grouped};
    END IF;
    RETURN NULL;
END $$
"""


def _count(sums: dict[str, str]) -> None:
    """Replace the function of the trigger on `rollouts` by one with these sums."""
    names, values = ", ".join(sums), ", ".join(sums.values())
    insert = (
        f"INSERT INTO rollout_tallies ({_KEYS}, {names}, last_finished_at)"
        f" SELECT {_KEYS}, {values}, max(finished_at) FILTER (WHERE sign > 0)"
    )
    zeros = ", ".join("0" for _ in sums)
    grouped = f"GROUP BY {_KEYS} HAVING ({values}) <> ({zeros})"
    op.execute(_FUNCTION.format(insert=insert, grouped=grouped))


def upgrade() -> None:
    """Add the column and the sum, and mark the rollouts that have tokens; the trigger counts."""
    op.execute("ALTER TABLE rollouts ADD COLUMN has_tokens boolean NOT NULL DEFAULT false")
    op.execute("ALTER TABLE rollout_tallies ADD COLUMN n_with_tokens bigint NOT NULL DEFAULT 0")
    _count(_SUMS | _WITH_TOKENS)
    op.execute(
        "UPDATE rollouts r SET has_tokens = true FROM trajectories t"
        " WHERE t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no"
        " AND (t.tokens IS NOT NULL OR t.tokens_uri IS NOT NULL)"
    )


def downgrade() -> None:
    """Drop the column and its counter."""
    _count(_SUMS)
    op.execute("ALTER TABLE rollout_tallies DROP COLUMN n_with_tokens")
    op.execute("ALTER TABLE rollouts DROP COLUMN has_tokens")
