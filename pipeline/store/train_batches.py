"""Train batches in the store: complete groups leased to a trainer, committed, given back.

Used by the trainer client. A batch is known by (run, consumer, trainer step): leasing it again
gives the same groups in the same order. Each function is one short transaction of the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import Refused
from pipeline.contract.rollout import batch_id_of
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.runs import Run

E_TAKEN_OVER = "E133"


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """The groups of a batch, in order; `replayed` when they were leased before."""

    group_ids: list[UUID]
    replayed: bool


_FIND = text("""
SELECT batch_id, state FROM train_batches
WHERE run_id = :run_id AND consumer = :consumer AND trainer_step = :step FOR UPDATE
""")

_MEMBERS = text(
    "SELECT group_id FROM train_batch_groups WHERE batch_id = :batch_id ORDER BY position"
)

_TAKE_OVER = text("""
WITH expired AS (
    SELECT batch_id FROM train_batches
    WHERE run_id = :run_id AND consumer <> :consumer AND state = 'leased' AND lease_until < now()
    ORDER BY batch_id FOR UPDATE SKIP LOCKED
), ended AS (
    UPDATE train_batches b SET state = 'expired', reason = 'taken over by ' || :consumer
    FROM expired WHERE b.batch_id = expired.batch_id
), freed AS (
    UPDATE groups g SET state = 'ready', train_batch_id = NULL
    FROM expired JOIN train_batch_groups m USING (batch_id)
    WHERE g.group_id = m.group_id AND g.state = 'leased' RETURNING g.run_id, g.group_id
)
INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
SELECT run_id, 'group', group_id, 'leased', 'ready', 'lease_expired' FROM freed
""")

_SELECT = text("""
SELECT group_id FROM groups
WHERE run_id = :run_id AND state = 'ready'
  AND n_succeeded >= CASE WHEN :full THEN n_target ELSE least(:min_size, n_target) END
ORDER BY min_version, group_no LIMIT :most FOR UPDATE SKIP LOCKED
""")

_IS_FINISHED = text("""
SELECT sealed_at IS NOT NULL
   AND NOT EXISTS (SELECT FROM groups g WHERE g.run_id = runs.run_id AND g.state = 'open')
FROM runs WHERE run_id = :run_id
""")

_LEASE = text("""
WITH batch AS (
    INSERT INTO train_batches (batch_id, run_id, consumer, trainer_step, state, policy_version,
                               lease_until, manifest_digest)
    VALUES (:batch_id, :run_id, :consumer, :step, 'leased', :policy_version,
            now() + make_interval(secs => :lease_s), :digest)
    ON CONFLICT (run_id, consumer, trainer_step) DO UPDATE SET state = 'leased', reason = NULL,
        leased_at = now(), lease_until = excluded.lease_until, policy_version = :policy_version,
        manifest_digest = excluded.manifest_digest
    WHERE train_batches.state = 'abandoned'
    RETURNING batch_id
), members AS (
    INSERT INTO train_batch_groups (batch_id, position, group_id)
    SELECT batch.batch_id, o.position, o.group_id
    FROM batch, unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS o (group_id, position)
    RETURNING batch_id, group_id
), leased AS (
    UPDATE groups g SET state = 'leased', train_batch_id = m.batch_id
    FROM members m WHERE g.group_id = m.group_id AND g.state = 'ready'
    RETURNING g.run_id, g.group_id
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state)
    SELECT run_id, 'group', group_id, 'ready', 'leased' FROM leased
)
SELECT count(*) FROM batch
""")


def lease_batch(
    connection: Connection,
    run: Run,
    *,
    consumer: str,
    step: int,
    spec: BatchSpec,
    policy_version: int | None,
    lease_s: float,
) -> LeasedBatch | None:
    """Lease complete groups to a consumer's step, or return what that step has already.

    The last batch of a finished run may be smaller than asked.

    Returns:
        None while there are too few ready groups; nothing is changed then.

    Raises:
        Refused: The step's lease ran out and another consumer took its groups.
    """
    key = {"run_id": run.run_id, "consumer": consumer, "step": step}
    known = connection.execute(_FIND, key).one_or_none()
    if known is not None and known.state != "abandoned":
        return _replay(connection, known, run, consumer, step, lease_s)
    group_ids = _ready_groups(connection, run, spec)
    if len(group_ids) < spec.groups:
        # Only now: what another consumer left lying is worth a look when there is too little.
        connection.execute(_TAKE_OVER, {"run_id": run.run_id, "consumer": consumer})
        group_ids = _ready_groups(connection, run, spec)
    if len(group_ids) < spec.groups and not (
        group_ids and connection.execute(_IS_FINISHED, key).scalar_one()
    ):
        return None
    inserted = connection.execute(
        _LEASE,
        key
        | {
            "batch_id": batch_id_of(run.run_id, consumer, step),
            "policy_version": policy_version,
            "lease_s": lease_s,
            "digest": _digest(group_ids),
            "ids": group_ids,
        },
    ).scalar_one()
    if not inserted:
        # Two processes of one consumer pull the same step: the other's groups are this one's too.
        known = connection.execute(_FIND, key).one()
        return _replay(connection, known, run, consumer, step, lease_s)
    return LeasedBatch(group_ids, replayed=False)


def _ready_groups(connection: Connection, run: Run, spec: BatchSpec) -> list[UUID]:
    rows = connection.execute(
        _SELECT,
        {
            "run_id": run.run_id,
            "full": spec.require_full_groups,
            "min_size": spec.min_group_size,
            "most": spec.groups,
        },
    )
    return list(rows.scalars())


def _replay(
    connection: Connection, known: Any, run: Run, consumer: str, step: int, lease_s: float
) -> LeasedBatch:
    if known.state == "expired":
        raise Refused(
            f"Step {step} of consumer {consumer} in run {run.slug} is no longer its own.",
            why="Its lease ran out and another consumer took the groups.",
            remedy="Continue from the last committed step with TrainerClient.resume.",
            code=E_TAKEN_OVER,
        )
    connection.execute(
        text(
            "UPDATE train_batches SET lease_until = now() + make_interval(secs => :lease_s)"
            " WHERE batch_id = :batch_id AND state = 'leased'"
        ),
        {"batch_id": known.batch_id, "lease_s": lease_s},
    )
    members = connection.execute(_MEMBERS, {"batch_id": known.batch_id}).scalars()
    return LeasedBatch(list(members), replayed=True)


_COMMIT = text("""
WITH done AS (
    UPDATE train_batches SET state = 'committed', committed_at = now(),
        checkpoint_uri = coalesce(:checkpoint_uri, checkpoint_uri)
    WHERE run_id = :run_id AND consumer = :consumer AND trainer_step <= :step AND state = 'leased'
    RETURNING batch_id
), consumed AS (
    UPDATE groups g SET state = 'consumed'
    FROM done JOIN train_batch_groups m USING (batch_id)
    WHERE g.group_id = m.group_id AND g.state = 'leased' RETURNING g.run_id, g.group_id
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state)
    SELECT run_id, 'group', group_id, 'leased', 'consumed' FROM consumed
)
SELECT count(*) FROM consumed
""")


def commit_batches(
    connection: Connection,
    run: Run,
    *,
    consumer: str,
    upto_step: int,
    checkpoint_uri: str | None = None,
) -> int:
    """Consume the groups of all leased steps up to this one; return how many there were.

    Doing it again changes nothing.

    Raises:
        Refused: One of the steps was taken over by another consumer.
    """
    key = {"run_id": run.run_id, "consumer": consumer, "step": upto_step}
    lost = connection.execute(
        text(
            "SELECT trainer_step FROM train_batches WHERE run_id = :run_id AND consumer = :consumer"
            " AND trainer_step <= :step AND state = 'expired' ORDER BY trainer_step LIMIT 1"
        ),
        key,
    ).scalar_one_or_none()
    if lost is not None:
        raise Refused(
            f"Step {lost} of consumer {consumer} cannot be committed.",
            why="Its lease ran out and another consumer took its groups: they would count twice.",
            remedy="Go back to the checkpoint before that step.",
            code=E_TAKEN_OVER,
        )
    return connection.execute(_COMMIT, key | {"checkpoint_uri": checkpoint_uri}).scalar_one()


_ABANDON = text("""
WITH given_up AS (
    UPDATE train_batches SET state = 'abandoned', reason = :reason
    WHERE run_id = :run_id AND consumer = :consumer AND trainer_step = :step AND state = 'leased'
    RETURNING batch_id
), members AS (
    DELETE FROM train_batch_groups m USING given_up WHERE m.batch_id = given_up.batch_id
    RETURNING m.group_id
), freed AS (
    UPDATE groups g SET state = 'ready', train_batch_id = NULL
    FROM members WHERE g.group_id = members.group_id AND g.state = 'leased'
    RETURNING g.run_id, g.group_id
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, 'leased', 'ready', :reason FROM freed
)
SELECT count(*) FROM freed
""")


def abandon_batch(
    connection: Connection, run: Run, *, consumer: str, step: int, reason: str
) -> int:
    """Give a step's groups back; return how many. A step that is not leased has none."""
    return connection.execute(
        _ABANDON,
        {"run_id": run.run_id, "consumer": consumer, "step": step, "reason": reason},
    ).scalar_one()


def list_steps(connection: Connection, run: Run, *, consumer: str) -> list[tuple[int, str]]:
    """Return a consumer's steps with their states, in order."""
    rows = connection.execute(
        text(
            "SELECT trainer_step, state FROM train_batches"
            " WHERE run_id = :run_id AND consumer = :consumer ORDER BY trainer_step"
        ),
        {"run_id": run.run_id, "consumer": consumer},
    )
    return [(row.trainer_step, row.state) for row in rows]


_GROUPS = text("""
SELECT g.group_id, g.group_no, g.n_target, g.reward_mean, g.reward_std, p.payload
FROM groups g JOIN prompts p USING (prompt_id) WHERE g.group_id = ANY(:ids)
""")

_ROLLOUTS = text("""
SELECT r.group_id, r.rollout_id, r.rollout_index, r.reward, r.stop_reason, a.attempt_no,
       a.version_min, a.version_max, t.body, t.body_uri, t.codec
FROM rollouts r
JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.winner_attempt_no
LEFT JOIN trajectories t ON t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no
WHERE r.group_id = ANY(:ids) AND r.state = 'succeeded'
ORDER BY r.group_id, r.rollout_index
""")


def read_groups(connection: Connection, group_ids: Sequence[UUID]) -> tuple[list[Any], list[Any]]:
    """Return the rows of groups, in the given order, and of their succeeded rollouts."""
    ids = {"ids": list(group_ids)}
    found = {row.group_id: row for row in connection.execute(_GROUPS, ids)}
    rollouts = list(connection.execute(_ROLLOUTS, ids))
    return [found[group_id] for group_id in group_ids], rollouts


def _digest(group_ids: Sequence[UUID]) -> str:
    return hashlib.sha256(b"".join(group_id.bytes for group_id in group_ids)).hexdigest()[:16]
