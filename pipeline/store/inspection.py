"""Single groups and rollouts, found by label or id.

Used by `rollout show`, by commands that name one group or rollout, and by the redrive of dead
letters. Reads only; each function is a statement or two.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from pipeline.contract.errors import NotFound
from pipeline.contract.rollout import group_label_of, rollout_label_of
from pipeline.store.runs import find_run
from pipeline.store.stored_bodies import StoredBody

#: `math7-g000013-r3-a1`, or a beginning of it that ends with a whole part.
_LABEL = re.compile(r"(?P<run>.+)-g(?P<group>\d+)(?:-r(?P<index>\d+)(?:-a\d+)?)?")
_HEX = re.compile(r"[0-9a-f]{4,32}")

_GROUP_OF_LABEL = text("""
SELECT group_id FROM groups WHERE run_id = :run_id AND group_no = :group_no
""")

_ROLLOUT_OF_LABEL = text("""
SELECT rollout_id FROM groups JOIN rollouts USING (group_id)
WHERE groups.run_id = :run_id AND groups.group_no = :group_no AND rollout_index = :index
""")

_GROUP = text("""
SELECT g.*, runs.slug, p.payload, p.dataset, p.split, p.row_no
FROM groups g JOIN runs USING (run_id) JOIN prompts p USING (prompt_id)
WHERE g.group_id = :group_id
""")

_GROUP_ROLLOUTS = text("""
SELECT rollout_id, rollout_index, state, attempt_no, reward, stop_reason, error_class
FROM rollouts WHERE group_id = :group_id ORDER BY rollout_index
""")

_ROLLOUT = text("""
SELECT r.*, runs.slug, p.payload FROM rollouts r
JOIN runs USING (run_id) JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id)
WHERE r.rollout_id = :rollout_id
""")

_ATTEMPTS = text("""
SELECT a.*, t.body, t.body_uri, t.body_digest, t.codec, t.tokens, t.tokens_uri, t.tokens_digest
FROM attempts a
LEFT JOIN trajectories t USING (rollout_id, attempt_no)
WHERE a.rollout_id = :rollout_id ORDER BY a.attempt_no
""")

_REWARDS = text("""
SELECT attempt_no, name, scorer_version, value, weight, status, error_class, latency_ms
FROM rewards WHERE rollout_id = :rollout_id ORDER BY attempt_no, name, scorer_version
""")


def find_group(connection: Connection, name: str) -> UUID:
    """Return the id of the group with this label, or with this beginning of an id.

    Raises:
        NotFound: No row has this name, or several rows have it.
    """
    label = _LABEL.fullmatch(name)
    if label and label["index"] is None:
        values = _numbers(connection, label)
        return _only(connection, _GROUP_OF_LABEL, values, "group", name)
    return _by_id(connection, "groups", "group_id", "group", name)


def find_rollout(connection: Connection, name: str) -> UUID:
    """Return the id of the rollout with this label or beginning of an id.

    The label may be that of an attempt.

    Raises:
        NotFound: No row has this name, or several rows have it.
    """
    label = _LABEL.fullmatch(name)
    if label and label["index"] is not None:
        values = _numbers(connection, label) | {"index": int(label["index"])}
        return _only(connection, _ROLLOUT_OF_LABEL, values, "rollout", name)
    return _by_id(connection, "rollouts", "rollout_id", "rollout", name)


def read_group(connection: Connection, group_id: UUID) -> dict[str, Any]:
    """Return a group as plain data, with a line for each of its rollouts."""
    row = connection.execute(_GROUP, {"group_id": group_id}).one()
    rollouts = connection.execute(_GROUP_ROLLOUTS, {"group_id": group_id}).all()
    return {
        "group_id": str(row.group_id),
        "label": group_label_of(row.slug, row.group_no),
        "run": row.slug,
        "state": row.state,
        "drop_reason": row.drop_reason,
        "n": row.n_target,
        **_columns(row, "n_min", "n_succeeded", "n_failed", "n_cancelled"),
        **_columns(row, "reward_mean", "reward_std", "min_version"),
        "ready_at": _time(row.ready_at),
        "source": {"dataset": row.dataset, "split": row.split, "row": row.row_no},
        "prompt": row.payload,
        "rollouts": [
            {
                "rollout_id": str(each.rollout_id),
                "label": rollout_label_of(row.slug, row.group_no, each.rollout_index),
                "state": each.state,
                "attempts": each.attempt_no,
                **_columns(each, "reward", "stop_reason", "error_class"),
            }
            for each in rollouts
        ],
    }


def read_rollout(connection: Connection, rollout_id: UUID) -> dict[str, Any]:
    """Return a rollout as plain data, with its attempts.

    An attempt's `trajectory` is a `StoredBody`, or None.
    """
    row = connection.execute(_ROLLOUT, {"rollout_id": rollout_id}).one()
    rewards = connection.execute(_REWARDS, {"rollout_id": rollout_id}).mappings().all()
    attempts = connection.execute(_ATTEMPTS, {"rollout_id": rollout_id}).all()
    return {
        "rollout_id": str(row.rollout_id),
        "label": rollout_label_of(row.slug, row.group_no, row.rollout_index),
        "run": row.slug,
        "group_id": str(row.group_id),
        **_columns(row, "state", "reward", "stop_reason", "error_class", "attempts_used"),
        "lost": row.lost_count,
        "died": row.died_count,
        "winner_attempt_no": row.winner_attempt_no,
        "not_before": _time(row.not_before) if row.state == "queued" else None,
        "finished_at": _time(row.finished_at),
        "prompt": row.payload,
        "rewards": [dict(each) for each in rewards],
        "attempts": [_attempt(each) for each in attempts],
    }


def _numbers(connection: Connection, label: re.Match[str]) -> dict[str, Any]:
    run = find_run(connection, label["run"])
    return {"run_id": run.run_id, "group_no": int(label["group"])}


def _by_id(connection: Connection, table: str, column: str, noun: str, name: str) -> UUID:
    digits = name.replace("-", "").lower()
    if not _HEX.fullmatch(digits):
        raise NotFound(
            f"{name!r} names no {noun}.",
            remedy="Give a label such as math7-g000013-r3, or at least 4 digits of an id.",
        )
    query = text(f"SELECT {column} FROM {table} WHERE {column} BETWEEN :low AND :high LIMIT 2")
    values = {"low": UUID(digits.ljust(32, "0")), "high": UUID(digits.ljust(32, "f"))}
    return _only(connection, query, values, noun, name)


def _only(
    connection: Connection, query: TextClause, values: dict[str, Any], noun: str, name: str
) -> UUID:
    found = connection.execute(query, values).scalars().all()
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"Several {noun}s begin with {name!r}.", remedy="Give more digits.")
    raise NotFound(f"There is no {noun} {name!r}.", remedy="See: rollout show run @last")


def _attempt(row: Any) -> dict[str, Any]:
    has_body = row.body is not None or row.body_uri is not None
    return {
        "attempt_no": row.attempt_no,
        "state": row.state,
        "worker": row.worker_id,
        "phase": row.phase,
        "dispatched_at": _time(row.dispatched_at),
        "started_at": _time(row.started_at),
        "ended_at": _time(row.ended_at),
        "error": None
        if row.error_class is None
        else {
            "class": row.error_class,
            "code": row.error_code,
            "message": row.error_message,
            "detail": row.error_detail,
        },
        "n_turns": row.n_turns,
        "tokens": {"prompt": row.prompt_tokens, "completion": row.completion_tokens},
        "policy_version": {"min": row.version_min, "max": row.version_max},
        "calls_replayed": row.calls_replayed or 0,
        "replayed_from": row.replayed_from or [],
        "timings": row.timings,
        "trajectory": StoredBody(*(getattr(row, name) for name in StoredBody._fields))
        if has_body
        else None,
    }


def _columns(row: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _time(at: Any) -> str | None:
    return None if at is None else at.isoformat()
