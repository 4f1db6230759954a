"""The rows of a batch of outcomes: attempts, rollouts, trajectories, rewards, events.

Used by `outcomes.py`, and by `rescores.py` for rewards, after their transactions have locked the
rollouts. Each table gets one statement for the whole batch. Must not: decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, text

from pipeline.contract.messages import Completion, RewardPart
from pipeline.contract.rollout import TERMINAL_ROLLOUT_STATES, AttemptState, RolloutState
from pipeline.retry import Rollout, Transition
from pipeline.store.engine import Bodies


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """A completion and the transition it causes."""

    rollout: Rollout
    completion: Completion
    transition: Transition

    @property
    def ends_rollout(self) -> bool:
        """Whether the rollout is terminal afterwards."""
        return self.transition.rollout_state in TERMINAL_ROLLOUT_STATES


_ATTEMPTS = text("""
UPDATE attempts a SET
    state = o.state, ended_at = now(), worker_id = coalesce(o.worker_id, a.worker_id),
    started_at = coalesce(a.started_at, now() - make_interval(secs => o.elapsed_s)),
    error_class = o.error_class, error_code = o.error_code,
    error_message = o.error_message, error_detail = o.error_detail, phase = o.phase,
    n_turns = o.n_turns, prompt_tokens = o.prompt_tokens, completion_tokens = o.completion_tokens,
    version_min = o.version_min, version_max = o.version_max, timings = CAST(o.timings AS jsonb),
    calls_replayed = o.calls_replayed, tokens_saved = o.tokens_saved,
    replayed_from = CAST(o.replayed_from AS integer[])
FROM unnest(
    CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:states AS text[]),
    CAST(:workers AS text[]), CAST(:elapsed AS double precision[]),
    CAST(:classes AS text[]), CAST(:codes AS text[]),
    CAST(:messages AS text[]), CAST(:details AS text[]), CAST(:phases AS text[]),
    CAST(:turns AS integer[]), CAST(:prompt_tokens AS bigint[]),
    CAST(:completion_tokens AS bigint[]), CAST(:version_mins AS integer[]),
    CAST(:version_maxs AS integer[]), CAST(:timings AS text[]),
    CAST(:calls_replayed AS integer[]), CAST(:tokens_saved AS bigint[]),
    CAST(:replayed_from AS text[])
) AS o (id, no, state, worker_id, elapsed_s, error_class, error_code, error_message,
        error_detail, phase, n_turns, prompt_tokens, completion_tokens, version_min, version_max,
        timings, calls_replayed, tokens_saved, replayed_from)
WHERE a.rollout_id = o.id AND a.attempt_no = o.no
""")

_ROLLOUTS = text("""
WITH moved AS (
    UPDATE rollouts r SET
        state = o.state, attempts_used = o.attempts_used, lost_count = o.lost_count,
        died_count = o.died_count, not_before = coalesce(o.not_before, r.not_before),
        unscored_no = coalesce(o.unscored_no, r.unscored_no),
        winner_attempt_no = CASE WHEN o.state = 'succeeded' THEN o.no END,
        stop_reason = o.stop_reason, reward = o.reward, error_class = o.error_class,
        error_code = o.error_code, has_tokens = o.has_tokens,
        finished_at = CASE WHEN o.state <> 'queued' THEN now() END
    FROM unnest(
        CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:befores AS text[]),
        CAST(:states AS text[]), CAST(:used AS integer[]), CAST(:lost AS integer[]),
        CAST(:died AS integer[]), CAST(:unscored AS integer[]),
        CAST(:not_befores AS timestamptz[]), CAST(:stops AS text[]),
        CAST(:rewards AS double precision[]), CAST(:classes AS text[]), CAST(:codes AS text[]),
        CAST(:reasons AS text[]), CAST(:with_tokens AS boolean[])
    ) AS o (id, no, before, state, attempts_used, lost_count, died_count, unscored_no, not_before,
            stop_reason, reward, error_class, error_code, reason, has_tokens)
    WHERE r.rollout_id = o.id AND r.state = o.before
    RETURNING r.run_id, r.rollout_id, o.no, o.before, o.state, o.reason
)
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state, reason)
SELECT run_id, 'rollout', rollout_id, no, before, state, reason FROM moved
""")

# When the result of an older attempt counts, newer attempts of the rollout end as superseded.
_OVERTAKEN = text("""
UPDATE attempts a SET state = 'superseded', ended_at = now()
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS o (id, no)
WHERE a.rollout_id = o.id AND a.attempt_no <> o.no AND a.state IN ('dispatched', 'running')
""")

_TRAJECTORIES = text("""
INSERT INTO trajectories
    (rollout_id, attempt_no, body, body_uri, body_digest, body_bytes, codec, n_steps,
     tokens, tokens_uri, tokens_digest, tokens_bytes)
SELECT * FROM unnest(
    CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:bodies AS bytea[]), CAST(:uris AS text[]),
    CAST(:digests AS text[]), CAST(:sizes AS bigint[]), CAST(:codecs AS text[]),
    CAST(:steps AS integer[]), CAST(:tokens AS bytea[]), CAST(:tokens_uris AS text[]),
    CAST(:tokens_digests AS text[]), CAST(:tokens_sizes AS bigint[]))
ON CONFLICT DO NOTHING
""")

# The trajectory of a remote session is stored once: with the attempt that scored it.
_MOVED = text("""
DELETE FROM trajectories t
USING unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS o (id, no)
    JOIN rollouts r ON r.rollout_id = o.id
    JOIN trajectories scored ON scored.rollout_id = o.id AND scored.attempt_no = o.no
WHERE t.rollout_id = o.id AND t.attempt_no = r.unscored_no AND t.attempt_no <> o.no
  AND t.body_digest = scored.body_digest
""")

_REWARDS = text("""
WITH given AS (
    SELECT * FROM unnest(
        CAST(:ids AS uuid[]), CAST(:nos AS integer[]), CAST(:names AS text[]),
        CAST(:versions AS text[]), CAST(:values AS double precision[]),
        CAST(:weights AS double precision[]), CAST(:statuses AS text[]), CAST(:classes AS text[]),
        CAST(:latencies AS double precision[]), CAST(:runs AS uuid[]))
        AS s (rollout_id, attempt_no, name, scorer_version, value, weight, status, error_class,
              latency_ms, run_id)
), written AS (
    INSERT INTO rewards (rollout_id, attempt_no, name, scorer_version, value, weight, status,
                         error_class, latency_ms)
    SELECT rollout_id, attempt_no, name, scorer_version, value, weight, status, error_class,
           latency_ms FROM given
    -- A failed score may be replaced; a value that a scorer gave is kept.
    ON CONFLICT (rollout_id, attempt_no, name, scorer_version) DO UPDATE SET
        value = excluded.value, status = excluded.status, error_class = excluded.error_class,
        latency_ms = excluded.latency_ms
    WHERE rewards.status <> 'ok'
    RETURNING *
)
INSERT INTO score_tallies (run_id, name, scorer_version, n, value_sum)
SELECT run_id, name, scorer_version, count(*), sum(w.value::numeric)
FROM written w JOIN given USING (rollout_id, attempt_no, name, scorer_version)
WHERE w.value IS NOT NULL GROUP BY run_id, name, scorer_version
""")

_DEAD_LETTERS = text("""
INSERT INTO dead_letters (kind, run_id, rollout_id, label, reason)
SELECT 'rollout', * FROM unnest(
    CAST(:runs AS uuid[]), CAST(:ids AS uuid[]), CAST(:labels AS text[]), CAST(:reasons AS text[]))
""")


def write_outcomes(connection: Connection, outcomes: Sequence[AttemptOutcome]) -> None:
    """Write the rows of a batch; every rollout is locked and occurs once."""
    connection.execute(_ATTEMPTS, _attempt_columns(outcomes))
    moved = [outcome for outcome in outcomes if outcome.transition.rollout_state is not None]
    if moved:
        connection.execute(_ROLLOUTS, _rollout_columns(moved))
    overtaken = [
        outcome
        for outcome in moved
        if outcome.transition.attempt_state is AttemptState.SUCCEEDED
        and outcome.completion.attempt_no != outcome.rollout.attempt_no
    ]
    if overtaken:
        connection.execute(_OVERTAKEN, _keys(overtaken))
    bodies = [outcome for outcome in outcomes if _has_body(outcome)]
    if bodies:
        connection.execute(_TRAJECTORIES, _trajectory_columns(bodies))
    scored = [o for o in bodies if o.ends_rollout and o.rollout.unscored_no is not None]
    if scored:
        connection.execute(_MOVED, _keys(scored))
    write_rewards(connection, [outcome.completion for outcome in outcomes])
    dead = [outcome for outcome in outcomes if outcome.transition.dead_letter]
    if dead:
        connection.execute(_DEAD_LETTERS, _dead_letter_columns(dead))


def write_rewards(connection: Connection, completions: Sequence[Completion]) -> None:
    """Write the scores of attempts."""
    parts = [(completion, part) for completion in completions for part in completion.reward_parts]
    if parts:
        connection.execute(_REWARDS, _reward_columns(parts))


def _has_body(outcome: AttemptOutcome) -> bool:
    return bool(outcome.completion.body or outcome.completion.body_uri)


def _keys(outcomes: Sequence[AttemptOutcome]) -> dict[str, list[Any]]:
    # Without `key_arrays`: its keys cost a tuple and a property for each outcome.
    return {
        "ids": [outcome.rollout.rollout_id for outcome in outcomes],
        "nos": [outcome.completion.attempt_no for outcome in outcomes],
    }


def _attempt_columns(outcomes: Sequence[AttemptOutcome]) -> dict[str, list[Any]]:
    completions = [outcome.completion for outcome in outcomes]
    errors = [completion.error for completion in completions]
    return _keys(outcomes) | {
        "states": [str(outcome.transition.attempt_state) for outcome in outcomes],
        "workers": [completion.worker_id or None for completion in completions],
        "elapsed": [completion.timings.get("elapsed_s", 0.0) for completion in completions],
        "classes": [str(error.error_class) if error else None for error in errors],
        "codes": [error.code if error else None for error in errors],
        "messages": [error.message if error else None for error in errors],
        "details": [error.detail if error else None for error in errors],
        "phases": [error.phase if error else "done" for error in errors],
        "turns": [completion.n_turns for completion in completions],
        "prompt_tokens": [completion.prompt_tokens for completion in completions],
        "completion_tokens": [completion.completion_tokens for completion in completions],
        "version_mins": [completion.version_min for completion in completions],
        "version_maxs": [completion.version_max for completion in completions],
        "timings": [orjson.dumps(completion.timings).decode() for completion in completions],
        "calls_replayed": [completion.calls_replayed or None for completion in completions],
        "tokens_saved": [completion.tokens_saved or None for completion in completions],
        "replayed_from": [_array(completion.replayed_from) for completion in completions],
    }


def _array(numbers: Sequence[int]) -> str | None:
    return "{" + ",".join(map(str, numbers)) + "}" if numbers else None


def _rollout_columns(moved: Sequence[AttemptOutcome]) -> dict[str, list[Any]]:
    won = [outcome.transition.rollout_state is RolloutState.SUCCEEDED for outcome in moved]
    failed = [outcome.transition.rollout_state is RolloutState.FAILED for outcome in moved]
    return _keys(moved) | {
        "befores": [str(outcome.rollout.state) for outcome in moved],
        "states": [str(outcome.transition.rollout_state) for outcome in moved],
        "used": [outcome.transition.attempts_used for outcome in moved],
        "lost": [outcome.transition.lost_count for outcome in moved],
        "died": [outcome.transition.died_count for outcome in moved],
        "unscored": [outcome.transition.unscored_no for outcome in moved],
        "not_befores": [outcome.transition.not_before for outcome in moved],
        "stops": [
            str(outcome.completion.stop_reason) if ok and outcome.completion.stop_reason else None
            for outcome, ok in zip(moved, won, strict=True)
        ],
        "rewards": [
            outcome.completion.reward if ok else None
            for outcome, ok in zip(moved, won, strict=True)
        ],
        "classes": [
            str(outcome.transition.error_class)
            if outcome.transition.rollout_state in TERMINAL_ROLLOUT_STATES
            and outcome.transition.error_class
            else None
            for outcome in moved
        ],
        "codes": [
            outcome.completion.error.code if bad and outcome.completion.error else None
            for outcome, bad in zip(moved, failed, strict=True)
        ],
        "reasons": [outcome.transition.reason or None for outcome in moved],
        "with_tokens": [
            ok and bool(outcome.completion.tokens or outcome.completion.tokens_uri)
            for outcome, ok in zip(moved, won, strict=True)
        ],
    }


def _trajectory_columns(outcomes: Sequence[AttemptOutcome]) -> dict[str, list[Any]]:
    completions = [outcome.completion for outcome in outcomes]
    return _keys(outcomes) | {
        "bodies": Bodies(completion.body or None for completion in completions),
        "uris": [completion.body_uri for completion in completions],
        "digests": [completion.body_digest for completion in completions],
        "sizes": [completion.body_bytes or len(completion.body) for completion in completions],
        "codecs": [completion.codec for completion in completions],
        "steps": [completion.n_steps for completion in completions],
        "tokens": Bodies(completion.tokens or None for completion in completions),
        "tokens_uris": [completion.tokens_uri for completion in completions],
        "tokens_digests": [completion.tokens_digest for completion in completions],
        "tokens_sizes": [
            completion.tokens_bytes or len(completion.tokens) or None for completion in completions
        ],
    }


def _reward_columns(parts: Sequence[tuple[Completion, RewardPart]]) -> dict[str, list[Any]]:
    return {
        "ids": [completion.rollout_id for completion, _ in parts],
        "nos": [completion.attempt_no for completion, _ in parts],
        "names": [part.name for _, part in parts],
        "versions": [part.scorer_version for _, part in parts],
        "values": [part.value for _, part in parts],
        "weights": [part.weight for _, part in parts],
        "statuses": [part.status for _, part in parts],
        "classes": [str(part.error_class) if part.error_class else None for _, part in parts],
        "latencies": [part.latency_ms for _, part in parts],
        "runs": [completion.run_id for completion, _ in parts],
    }


def _dead_letter_columns(dead: Sequence[AttemptOutcome]) -> dict[str, list[Any]]:
    return {
        "runs": [outcome.rollout.run_id for outcome in dead],
        "ids": [outcome.rollout.rollout_id for outcome in dead],
        "labels": [outcome.completion.label for outcome in dead],
        "reasons": [outcome.transition.reason for outcome in dead],
    }
