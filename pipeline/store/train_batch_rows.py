"""The content of a train batch: its groups, and their succeeded rollouts with the stored bodies.

Used by the trainer client in the transaction that leased the batch, and by readers of a run's
groups without a lease. Reads only.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.store.engine import BINARY
from pipeline.store.runs import Run

_LEASED_ELSEWHERE = text("""
SELECT count(*) FROM train_batches JOIN train_batch_groups USING (batch_id)
WHERE run_id = :run_id AND state = 'leased' AND consumer <> :consumer
""")


class BatchGroup(NamedTuple):
    """A group of a batch, with its prompt's payload."""

    group_id: UUID
    group_no: int
    n_target: int
    reward_mean: float | None
    reward_std: float | None
    payload: dict[str, Any]


class BatchRollout(NamedTuple):
    """A succeeded rollout of a batch, with the tokens of the attempt that won.

    `body` is None for a rollout with tokens: `read_body_row` reads it when a trainer asks for it.
    """

    group_id: UUID
    rollout_id: UUID
    rollout_index: int
    reward: float | None
    stop_reason: str | None
    attempt_no: int
    version_min: int | None
    version_max: int | None
    body: bytes | None
    body_uri: str | None
    body_digest: str | None
    codec: str | None
    tokens: bytes | None
    tokens_uri: str | None
    tokens_digest: str | None


_GROUP = "SELECT g.group_id, g.group_no, g.n_target, g.reward_mean, g.reward_std, p.payload"
_ROLLOUT = """
SELECT r.group_id, r.rollout_id, r.rollout_index, r.reward, r.stop_reason, a.attempt_no,
       a.version_min, a.version_max, CASE WHEN t.tokens_digest IS NULL THEN t.body END AS body,
       t.body_uri, t.body_digest, t.codec, t.tokens, t.tokens_uri, t.tokens_digest
"""
_WINNER = """
JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.winner_attempt_no
LEFT JOIN trajectories t ON t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no
"""

_GROUPS = text(f"""{_GROUP}
FROM train_batch_groups m JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
WHERE m.batch_id = :batch_id ORDER BY m.position
""")

_ROLLOUTS = text(f"""{_ROLLOUT}
FROM train_batch_groups m JOIN rollouts r USING (group_id) {_WINNER}
WHERE m.batch_id = :batch_id AND r.state = 'succeeded'
ORDER BY m.position, r.rollout_index
""").execution_options(**{BINARY: True})

_IN_ORDER = """
g.run_id = :run_id AND g.group_no >= :first AND g.group_no < :end
AND g.state IN ('ready', 'leased', 'consumed')
"""

_STORED_GROUPS = text(f"""{_GROUP}
FROM groups g JOIN prompts p USING (prompt_id) WHERE {_IN_ORDER} ORDER BY g.group_no
""")

_STORED_ROLLOUTS = text(f"""{_ROLLOUT}
FROM groups g JOIN rollouts r USING (group_id) {_WINNER}
WHERE {_IN_ORDER} AND r.state = 'succeeded' ORDER BY g.group_no, r.rollout_index
""").execution_options(**{BINARY: True})

_N_GROUPS = text("SELECT coalesce(max(group_no) + 1, 0) FROM groups WHERE run_id = :run_id")


def read_batch(
    connection: Connection, batch_id: UUID
) -> tuple[list[BatchGroup], list[BatchRollout]]:
    """Return the groups of a batch, in its order, and their succeeded rollouts."""
    # Selected by the batch and not by a list of ids, so that Postgres can keep a generic plan.
    values = {"batch_id": batch_id}
    groups = [BatchGroup(*row) for row in connection.execute(_GROUPS, values)]
    return groups, [BatchRollout(*row) for row in connection.execute(_ROLLOUTS, values)]


def read_stored_groups(
    connection: Connection, run_id: UUID, first: int, end: int
) -> tuple[list[BatchGroup], list[BatchRollout]]:
    """Return the groups of a run that are ready, leased or consumed, from number `first` to `end`.

    No lease is taken: another transaction may lease or consume them meanwhile.
    """
    values = {"run_id": run_id, "first": first, "end": end}
    groups = [BatchGroup(*row) for row in connection.execute(_STORED_GROUPS, values)]
    kept = {group.group_id for group in groups}
    rows = [BatchRollout(*row) for row in connection.execute(_STORED_ROLLOUTS, values)]
    # Each statement has a snapshot of its own: a group may become ready between the two.
    return groups, [row for row in rows if row.group_id in kept]


def count_group_numbers(connection: Connection, run_id: UUID) -> int:
    """Return the number after the last group of a run."""
    return connection.execute(_N_GROUPS, {"run_id": run_id}).scalar_one()


def count_leased_elsewhere(connection: Connection, run: Run, consumer: str | None) -> int:
    """Return how many groups of a run are leased to other consumers than this one; None: 0."""
    if consumer is None:
        return 0
    values = {"run_id": run.run_id, "consumer": consumer}
    return connection.execute(_LEASED_ELSEWHERE, values).scalar_one()
