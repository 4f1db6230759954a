"""Stored trajectories that are scored again, and the effect of their new scores.

Read by `rollout rescore`, written by the collector. A rollout that failed only in scoring becomes
`succeeded`, unless its group is leased or consumed. Any other rollout keeps its reward, and the new
value is stored beside it. Recording the same score again changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import orjson
from sqlalchemy import Connection, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import Completion
from pipeline.contract.rollout import RolloutState, label_of
from pipeline.store.engine import BINARY, READY_CHANNEL, RESCORED_CHANNEL, notify
from pipeline.store.groups import add_to_counters, close_groups, lock_groups
from pipeline.store.outcome_rows import write_rewards
from pipeline.store.runs import Run

#: A notification takes less than 8,000 bytes; JSON may write a character as six.
_VERDICTS_AT_ONCE = 100
_REASON_CHARS = 400
NAME_CHARS = 100


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Committed scores of some rollouts, as the payload of a notification (`RESCORED_CHANNEL`)."""

    reward: str  #: the name's first `NAME_CHARS` characters
    scored: list[UUID]
    failed: list[UUID]
    reason: str | None  #: why the first of `failed` has no value

    @classmethod
    def read(cls, payload: str) -> Verdicts:
        """Return the content of a notification."""
        fields = orjson.loads(payload)
        ids = {name: [UUID(each) for each in fields[name]] for name in ("scored", "failed")}
        return cls(reward=fields["reward"], reason=fields["reason"], **ids)


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A rollout that ended, with the data that a scorer needs; `body` or `body_uri` is set."""

    rollout_id: UUID
    group_id: UUID
    group_no: int
    rollout_index: int
    n: int
    attempt_no: int
    label: str
    prompt: dict[str, Any]
    codec: str
    body: bytes | None
    body_uri: str | None
    body_digest: str | None


_RESCORABLE = """
FROM rollouts r JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
JOIN attempts a ON a.rollout_id = r.rollout_id
    AND a.attempt_no = coalesce(r.winner_attempt_no, r.attempt_no)
JOIN trajectories t ON t.rollout_id = a.rollout_id AND t.attempt_no = a.attempt_no
WHERE r.run_id = :run_id
  AND ((r.state = 'succeeded' AND CAST(:error_class AS text) IS NULL)
       OR (r.state = 'failed' AND a.phase = 'scoring'
           AND r.error_class = coalesce(:error_class, r.error_class)))
"""


def count_rescorable(
    connection: Connection, run: Run, *, error_class: ErrorClass | None = None
) -> int:
    """Return how many trajectories `read_rescorable` would give."""
    values = {"run_id": run.run_id, "error_class": error_class}
    return connection.execute(text("SELECT count(*)" + _RESCORABLE), values).scalar_one()


def read_rescorable(
    connection: Connection,
    run: Run,
    *,
    error_class: ErrorClass | None = None,
    after: UUID | None = None,
    most: int = 100,
) -> list[StoredTrajectory]:
    """Return trajectories in order of their rollouts' ids.

    These are the winning attempts of succeeded rollouts, and the last attempts of rollouts that
    failed in scoring; other rollouts have no complete trajectory.

    Args:
        connection: An open transaction.
        run: The run.
        error_class: Only rollouts that failed with this class.
        after: Continue after this rollout.
        most: At most so many.
    """
    query = (
        "SELECT r.rollout_id, r.group_id, r.group_no, r.rollout_index, g.n_rollouts, a.attempt_no,"
        " p.payload, t.codec, t.body, t.body_uri, t.body_digest"
        + _RESCORABLE
        + "AND (CAST(:after AS uuid) IS NULL OR r.rollout_id > :after)"
        " ORDER BY r.rollout_id LIMIT :most"
    )
    values = {"run_id": run.run_id, "error_class": error_class, "after": after, "most": most}
    return [
        StoredTrajectory(
            rollout_id=row.rollout_id,
            group_id=row.group_id,
            group_no=row.group_no,
            rollout_index=row.rollout_index,
            n=row.n_rollouts,
            attempt_no=row.attempt_no,
            label=label_of(run.slug, row.group_no, row.rollout_index, row.attempt_no),
            prompt=row.payload,
            codec=row.codec,
            body=None if row.body is None else bytes(row.body),
            body_uri=row.body_uri,
            body_digest=row.body_digest,
        )
        for row in connection.execute(text(query), values, execution_options={BINARY: True})
    ]


_SCORED = text("""
SELECT DISTINCT w.rollout_id FROM rewards w
WHERE w.rollout_id = ANY(:ids) AND w.name = :reward AND w.status = 'ok'
""")


def find_scored(connection: Connection, rollouts: Collection[UUID], reward: str) -> set[UUID]:
    """Return those of some rollouts that have a value of this reward."""
    values = {"ids": list(rollouts), "reward": reward}
    return set(connection.execute(_SCORED, values).scalars())


_LOCK = text("""
SELECT r.rollout_id, r.group_id, r.run_id,
       r.state = 'failed' AND a.state = 'failed' AND a.phase = 'scoring'
           AND r.attempt_no = given.no AND runs.config ->> 'reward' = given.reward AS is_waiting
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:rewards AS text[]))
    AS given (id, no, reward)
JOIN rollouts r ON r.rollout_id = given.id JOIN runs ON runs.run_id = r.run_id
JOIN attempts a ON a.rollout_id = given.id AND a.attempt_no = given.no
ORDER BY r.rollout_id FOR UPDATE OF r
""")

# A leased or consumed group is not changed any more. A group that was dropped for another reason
# than failures stays dropped.
_REOPEN = text("""
WITH reopened AS (
    UPDATE groups g SET state = 'open', ready_at = NULL, drop_reason = NULL, reward_mean = NULL,
        reward_std = NULL
    FROM (SELECT group_id, state FROM groups WHERE group_id = ANY(:ids)) AS before
    WHERE g.group_id = before.group_id
      AND (g.state = 'ready' OR (g.state = 'dropped' AND g.drop_reason = 'failed'))
    RETURNING g.run_id, g.group_id, before.state AS before
), noted AS (
    INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
    SELECT run_id, 'group', group_id, before, 'open', 'rescored' FROM reopened
)
SELECT group_id FROM reopened
""")

_ADOPT = text("""
WITH given AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]),
                         CAST(:values AS double precision[]), CAST(:stops AS text[]))
        AS s (id, no, reward, stop_reason)
), moved AS (
    UPDATE rollouts r SET state = 'succeeded', winner_attempt_no = given.no, reward = given.reward,
        stop_reason = given.stop_reason, error_class = NULL, error_code = NULL
    FROM given WHERE r.rollout_id = given.id AND r.state = 'failed'
    RETURNING r.run_id, r.rollout_id, r.attempt_no
), ended AS (
    UPDATE attempts a SET state = 'succeeded', phase = 'done', error_class = NULL,
        error_code = NULL, error_message = NULL, error_detail = NULL
    FROM moved m WHERE a.rollout_id = m.rollout_id AND a.attempt_no = m.attempt_no
)
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state, reason)
SELECT run_id, 'rollout', rollout_id, attempt_no, 'failed', 'succeeded', 'rescored' FROM moved
""")


def record_rescores(connection: Connection, completions: Sequence[Completion]) -> list[Completion]:
    """Record new scores of stored trajectories; the caller commits, then acknowledges.

    Returns:
        Completions of attempts that this store does not know.
    """
    # Of two completions of one rollout, the last one is newer.
    latest = {completion.rollout_id: completion for completion in completions}
    if not latest:
        return []
    newest = list(latest.values())
    rows = connection.execute(
        _LOCK,
        {
            "ids": [completion.rollout_id for completion in newest],
            "nos": [completion.attempt_no for completion in newest],
            "rewards": [_reward_name(completion) for completion in newest],
        },
    ).all()
    found = {row.rollout_id: row for row in rows}
    known = [completion for completion in newest if completion.rollout_id in found]
    write_rewards(connection, known)
    adoptable = [
        completion
        for completion in known
        if completion.outcome == "succeeded" and found[completion.rollout_id].is_waiting
    ]
    if adoptable:
        _adopt(connection, adoptable, found)
    for first in range(0, len(known), _VERDICTS_AT_ONCE):
        for verdicts in _verdicts(known[first : first + _VERDICTS_AT_ONCE]):
            notify(connection, RESCORED_CHANNEL, orjson.dumps(asdict(verdicts)).decode())
    return [completion for completion in newest if completion.rollout_id not in found]


def _adopt(
    connection: Connection, completions: Sequence[Completion], found: dict[UUID, Any]
) -> None:
    """Make rollouts `succeeded` that only lacked a reward, as far as their groups have room."""
    groups = lock_groups(connection, [found[c.rollout_id].group_id for c in completions])
    closed = [group_id for group_id, group in groups.items() if not group.is_open]
    writable = {group_id for group_id, group in groups.items() if group.is_open}
    writable |= set(connection.execute(_REOPEN, {"ids": closed}).scalars())
    room = {group_id: groups[group_id].room for group_id in writable}
    taken: list[Completion] = []
    deltas: dict[UUID, Counter[RolloutState]] = {}
    for completion in completions:
        group_id = found[completion.rollout_id].group_id
        if room.get(group_id, 0) > 0:
            room[group_id] -= 1
            taken.append(completion)
            delta = deltas.setdefault(group_id, Counter())
            delta[RolloutState.FAILED] -= 1
            delta[RolloutState.SUCCEEDED] += 1
    connection.execute(
        _ADOPT,
        {
            "ids": [completion.rollout_id for completion in taken],
            "nos": [completion.attempt_no for completion in taken],
            "values": [completion.reward for completion in taken],
            "stops": [completion.stop_reason for completion in taken],
        },
    )
    add_to_counters(connection, deltas)
    close_groups(connection, list(writable))
    notify(connection, READY_CHANNEL)


def _verdicts(completions: Sequence[Completion]) -> Iterator[Verdicts]:
    by_reward: dict[str, list[Completion]] = {}
    for completion in completions:
        by_reward.setdefault(_reward_name(completion) or "", []).append(completion)
    for reward, scored in by_reward.items():
        failed = [completion for completion in scored if completion.error]
        reasons = [
            f"{error.error_class} ({error.code}): {error.message}"
            for error in (completion.error for completion in failed)
            if error is not None
        ]
        yield Verdicts(
            reward=reward[:NAME_CHARS],
            scored=[c.rollout_id for c in scored if not c.error],
            failed=[c.rollout_id for c in failed],
            reason=reasons[0][:_REASON_CHARS] if reasons else None,
        )


def _reward_name(completion: Completion) -> str | None:
    return completion.reward_parts[0].name if completion.reward_parts else None
