"""The effect of new scores of stored trajectories.

Used by the collector. A rollout that failed only in scoring becomes `succeeded`, unless its group
is leased or consumed. Any other rollout keeps its reward, and the new value is stored beside it.
Recording the same score again changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.messages import Completion
from pipeline.contract.rollout import RolloutState
from pipeline.store.attempt_keys import key_arrays
from pipeline.store.engine import READY_CHANNEL, notify
from pipeline.store.groups import add_to_counters, close_groups, lock_groups, reopen_groups
from pipeline.store.outcome_rows import write_rewards
from pipeline.store.rescore_requests import record_verdicts

_REASON_CHARS = 400

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

#: A leased or consumed group is not changed any more. A group that was dropped for another reason
#: than failures stays dropped.
_MAY_REOPEN = "(g.state = 'ready' OR (g.state = 'dropped' AND g.drop_reason = 'failed'))"

_ADOPT = text("""
WITH given AS (
    SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[]),
                         CAST(:values AS double precision[]), CAST(:stops AS text[]))
        AS s (id, no, reward, stop_reason)
), moved AS (
    UPDATE rollouts r SET state = 'succeeded', winner_attempt_no = given.no, reward = given.reward,
        stop_reason = given.stop_reason, error_class = NULL, error_code = NULL,
        has_tokens = EXISTS (
            SELECT FROM trajectories t WHERE t.rollout_id = given.id AND t.attempt_no = given.no
              AND (t.tokens IS NOT NULL OR t.tokens_uri IS NOT NULL))
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
        key_arrays(completion.key for completion in newest)
        | {"rewards": [_reward_name(completion) for completion in newest]},
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
    record_verdicts(connection, [_verdict(completion) for completion in known])
    return [completion for completion in newest if completion.rollout_id not in found]


def _adopt(
    connection: Connection, completions: Sequence[Completion], found: dict[UUID, Any]
) -> None:
    """Make rollouts `succeeded` that only lacked a reward, as far as their groups have room."""
    groups = lock_groups(connection, [found[c.rollout_id].group_id for c in completions])
    closed = [group_id for group_id, group in groups.items() if not group.is_open]
    writable = {group_id for group_id, group in groups.items() if group.is_open}
    writable |= reopen_groups(connection, closed, _MAY_REOPEN, reason="rescored")
    room = {group_id: groups[group_id].room for group_id in writable}
    taken: list[Completion] = []
    deltas: defaultdict[UUID, Counter[RolloutState]] = defaultdict(Counter)
    for completion in completions:
        group_id = found[completion.rollout_id].group_id
        if room.get(group_id, 0) > 0:
            room[group_id] -= 1
            taken.append(completion)
            deltas[group_id].update({RolloutState.FAILED: -1, RolloutState.SUCCEEDED: 1})
    connection.execute(
        _ADOPT,
        key_arrays(completion.key for completion in taken)
        | {
            "values": [completion.reward for completion in taken],
            "stops": [completion.stop_reason for completion in taken],
        },
    )
    add_to_counters(connection, deltas)
    close_groups(connection, list(writable))
    notify(connection, READY_CHANNEL)


def _verdict(completion: Completion) -> tuple[UUID, str, str, str | None]:
    error, reward = completion.error, _reward_name(completion) or ""
    if error is None:
        return completion.rollout_id, reward, "scored", None
    reason = f"{error.error_class} ({error.code}): {error.message}"[:_REASON_CHARS]
    return completion.rollout_id, reward, "failed", reason


def _reward_name(completion: Completion) -> str | None:
    return completion.reward_parts[0].name if completion.reward_parts else None
