"""Leases of train batches: complete groups selected for a consumer's step, handed out, renewed.

Used by the trainer client. The key of a batch is (run, consumer, trainer step): leasing the same
key again gives the same groups in the same order. Each function runs in a short transaction of its
caller. Must not: commit a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from pipeline.contract.errors import NotAllowed
from pipeline.contract.rollout import batch_id_of
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.engine import WORK_CHANNEL, notify
from pipeline.store.group_policy import set_late_deadlines
from pipeline.store.runs import Run
from pipeline.store.unfit_groups import HAS_VARIANCE, IS_FRESH, IS_LARGE_ENOUGH, drop_unfit, fitness

E_TAKEN_OVER = "E133"

#: Groups that a batch by tokens selects from first; four times as many if their tokens are too few.
_FIRST_GROUPS = 64


class LeasedBatch(NamedTuple):
    """A batch leased to the consumer."""

    batch_id: UUID
    manifest: str  #: digest of its groups in their order
    replayed: bool  #: leased before this call
    handed_out: bool  #: the trainer may have it already


_FIND = text("""
SELECT state, manifest_digest, handed_out_at IS NOT NULL AS handed_out FROM train_batches
WHERE run_id = :run_id AND consumer = :consumer AND trainer_step = :step FOR UPDATE
""")

# Waits for no lock, because the pull before it has locked the groups that were ready. A batch of
# which another transaction holds a group is taken over by a later pull.
_TAKE_OVER = text("""
WITH expired AS (
    SELECT batch_id FROM train_batches
    WHERE run_id = :run_id AND consumer <> :consumer AND state = 'leased' AND lease_until < now()
    ORDER BY batch_id FOR UPDATE SKIP LOCKED
), members AS (
    SELECT batch_id, group_id
    FROM expired JOIN train_batch_groups USING (batch_id) JOIN groups USING (group_id)
    WHERE state = 'leased'
), locked AS (
    SELECT group_id FROM groups WHERE group_id IN (SELECT group_id FROM members)
      AND state = 'leased' FOR UPDATE SKIP LOCKED
), whole AS (
    SELECT batch_id FROM expired EXCEPT SELECT batch_id FROM members
    WHERE group_id NOT IN (SELECT group_id FROM locked)
), ended AS (
    UPDATE train_batches b SET state = 'expired', reason = 'taken over by ' || :consumer
    FROM whole WHERE b.batch_id = whole.batch_id
), freed AS (
    UPDATE groups g SET state = 'ready' FROM members JOIN whole USING (batch_id)
    WHERE g.group_id = members.group_id AND g.state = 'leased'
    RETURNING g.run_id, g.group_id
)
INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
SELECT run_id, 'group', group_id, 'leased', 'ready', 'lease_expired' FROM freed
""")

_IS_FINISHED = text("""
SELECT sealed_at IS NOT NULL
   AND NOT EXISTS (SELECT FROM groups g WHERE g.run_id = runs.run_id AND g.state = 'open')
FROM runs WHERE run_id = :run_id
""")

# One statement for the usual case, because a pull waits one round trip for each statement.
_LEASE = """
WITH known AS (
    SELECT state FROM train_batches
    WHERE run_id = :run_id AND consumer = :consumer AND trainer_step = :step FOR UPDATE
), picked AS (
    SELECT group_id, min_version, group_no, ready_at FROM groups
    WHERE run_id = :run_id AND state = 'ready'
      AND {is_large_enough}
      AND NOT EXISTS (SELECT FROM known WHERE state <> 'abandoned')
      AND {is_fresh} AND {has_variance}
    ORDER BY {order} LIMIT :most FOR UPDATE SKIP LOCKED
), placed AS (
    {placed}
), manifest AS (
    SELECT count(*) AS n, sum(tokens) AS tokens,
        encode(sha256(string_agg(uuid_send(group_id), '' ORDER BY position)), 'hex') AS digest
    FROM placed
), batch AS (
    INSERT INTO train_batches (batch_id, run_id, consumer, trainer_step, state, policy_version,
                               lease_until, manifest_digest)
    SELECT :batch_id, :run_id, :consumer, :step, 'leased', :policy_version,
           now() + make_interval(secs => :lease_s), left(digest, 16)
    FROM manifest WHERE {is_enough}
    ON CONFLICT (run_id, consumer, trainer_step) DO UPDATE SET state = 'leased', reason = NULL,
        leased_at = now(), lease_until = excluded.lease_until, handed_out_at = NULL,
        policy_version = :policy_version, committed_at = NULL, checkpoint_uri = NULL,
        manifest_digest = excluded.manifest_digest
    WHERE train_batches.state = 'abandoned'
    RETURNING batch_id
), members AS (
    INSERT INTO train_batch_groups (batch_id, position, group_id)
    SELECT batch_id, position, group_id FROM batch, placed
    RETURNING group_id
), leased AS (
    UPDATE groups g SET state = 'leased'
    FROM members m WHERE g.group_id = m.group_id AND g.state = 'ready'
    RETURNING g.run_id, g.group_id
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state)
    SELECT run_id, 'group', group_id, 'ready', 'leased' FROM leased
), renewed AS (
    -- A pull renews the earlier steps of its consumer, so that a trainer may commit rarely.
    UPDATE train_batches SET lease_until = now() + make_interval(secs => :lease_s)
    WHERE batch_id IN (SELECT batch_id FROM train_batches
                       WHERE run_id = :run_id AND consumer = :consumer AND state = 'leased'
                         AND lease_until < now() + make_interval(secs => :lease_s / 2)
                         AND EXISTS (SELECT FROM batch) FOR UPDATE SKIP LOCKED)
)
SELECT (SELECT state FROM known) AS before, n, {is_enough} AS is_enough,
       EXISTS (SELECT FROM batch) AS is_leased, left(digest, 16) AS manifest FROM manifest
"""

_BY_GROUPS = {
    "placed": """SELECT group_id, row_number() OVER (ORDER BY {order}) AS position, 0 AS tokens
    FROM picked""",
    "is_enough": "n >= :least",
}
# More groups may be ready than were picked. So a batch with too few tokens counts as the rest of a
# run only if fewer groups were picked than the limit.
_BY_TOKENS = {
    "placed": """SELECT * FROM (
        SELECT group_id, row_number() OVER in_order AS position, tokens,
               sum(tokens) OVER in_order - tokens AS tokens_before
        FROM picked CROSS JOIN LATERAL (
            SELECT coalesce(sum(completion_tokens), 0) AS tokens FROM rollouts r
            JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.winner_attempt_no
            WHERE r.group_id = picked.group_id AND r.state = 'succeeded') AS sampled
        WINDOW in_order AS (ORDER BY {order})) AS sized
    WHERE tokens_before < :tokens""",
    "is_enough": "(tokens >= :tokens OR (n >= :least AND n < :most))",
}
_ORDERS = {"oldest_version": "min_version, group_no", "fifo": "ready_at, group_no"}


def _lease_statement(order: str, size: dict[str, str]) -> TextClause:
    placed = size["placed"].format(order=order)
    return text(
        _LEASE.format(
            order=order,
            placed=placed,
            is_enough=size["is_enough"],
            is_fresh=IS_FRESH,
            has_variance=HAS_VARIANCE,
            is_large_enough=IS_LARGE_ENOUGH,
        )
    )


_LEASES = {
    (name, by_tokens): _lease_statement(order, _BY_TOKENS if by_tokens else _BY_GROUPS)
    for name, order in _ORDERS.items()
    for by_tokens in (False, True)
}

_RENEW = text("""
UPDATE train_batches SET lease_until = now() + make_interval(secs => :lease_s)
WHERE batch_id IN (SELECT batch_id FROM train_batches
                   WHERE run_id = :run_id AND consumer = :consumer AND state = 'leased'
                   FOR UPDATE SKIP LOCKED)
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
    """Lease complete groups to a consumer's step, or return the batch that this step has already.

    The last batch of a finished run may hold fewer groups than the spec.

    Returns:
        None while there are too few ready groups; nothing is changed then.

    Raises:
        NotAllowed: The step's lease ran out and another consumer took its groups.
    """
    values: dict[str, Any] = {
        "run_id": run.run_id,
        "consumer": consumer,
        "step": step,
        "batch_id": batch_id_of(run.run_id, consumer, step),
        "policy_version": policy_version,
        "lease_s": lease_s,
        "tokens": spec.tokens,
        **fitness(run, spec, policy_version),
    }
    found = _try_to_lease(connection, spec, values)
    is_new = found.before in (None, "abandoned")
    if is_new and not found.is_enough:
        # Expired leases of other consumers are only looked for when too few groups are ready.
        connection.execute(_TAKE_OVER, values)
        drop_unfit(connection, run, spec, values)
        if spec.group_deadline_s is not None:
            set_late_deadlines(connection, run, spec.group_deadline_s)
        is_rest = connection.execute(_IS_FINISHED, values).scalar_one()
        found = _try_to_lease(connection, spec, values, is_rest=is_rest)
    elif is_new:
        drop_unfit(connection, run, spec, values)
    if found.is_leased:
        if run.config.is_admitted:
            # The dispatcher may begin as many groups as the trainer has taken.
            notify(connection, WORK_CHANNEL)
        return LeasedBatch(values["batch_id"], found.manifest, replayed=False, handed_out=False)
    if is_new and not found.is_enough:
        return None
    # Two processes of one consumer may pull the same step: both get the batch that one leased.
    return _replay(connection, values, connection.execute(_FIND, values).one(), run)


def _try_to_lease(
    connection: Connection, spec: BatchSpec, values: dict[str, Any], *, is_rest: bool = False
) -> Any:
    lease = _LEASES[spec.order, spec.tokens is not None]
    most = spec.groups or _FIRST_GROUPS
    while True:
        least = 1 if is_rest else most
        found = connection.execute(lease, values | {"most": most, "least": least}).one()
        if found.is_enough or spec.tokens is None or found.n < most:
            return found
        most *= 4


def _replay(connection: Connection, values: dict[str, Any], found: Any, run: Run) -> LeasedBatch:
    if found.state == "expired":
        raise NotAllowed(
            f"Step {values['step']} of consumer {values['consumer']} in run {run.slug} is no"
            " longer its own.",
            why="Its lease ran out and another consumer took the groups.",
            remedy="Continue from the last committed step with TrainerClient.resume.",
            code=E_TAKEN_OVER,
        )
    connection.execute(_RENEW, values)
    return LeasedBatch(
        values["batch_id"],
        found.manifest_digest,
        replayed=True,
        handed_out=found.handed_out,
    )


def renew_leases(connection: Connection, run: Run, *, consumer: str, lease_s: float) -> int:
    """Renew the leases of all steps that a consumer holds; return how many it renewed."""
    values = {"run_id": run.run_id, "consumer": consumer, "lease_s": lease_s}
    return connection.execute(_RENEW, values).rowcount


_HAND_OUT = text("""
UPDATE train_batches SET handed_out_at = coalesce(handed_out_at, now())
WHERE batch_id = :batch_id AND state = 'leased' AND manifest_digest = :manifest
""")


def hand_out_batch(connection: Connection, batch: LeasedBatch) -> bool:
    """Fix the groups of a batch before a trainer gets it; return whether they are still the same.

    Several processes of one consumer may pull a step at the same time. After this call all of them
    get these groups.
    """
    values = {"batch_id": batch.batch_id, "manifest": batch.manifest}
    return connection.execute(_HAND_OUT, values).rowcount == 1
