"""Trajectories of remote sessions that wait for their reward, as completions without one.

Written like all outcomes (`outcomes.py`), read by the dispatcher for the attempt that scores them.
Must not: score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, text

from pipeline.contract.messages import AttemptKey, Completion
from pipeline.contract.rollout import label_of
from pipeline.store.attempt_keys import key_arrays
from pipeline.store.engine import BINARY

_READ = text("""
SELECT a.run_id, r.group_id, a.rollout_id, a.attempt_no, runs.slug, r.group_no, r.rollout_index,
       a.worker_id, a.n_turns, a.prompt_tokens, a.completion_tokens, a.version_min, a.version_max,
       t.n_steps, t.codec, t.body, t.body_bytes, t.body_uri, t.body_digest,
       t.tokens, t.tokens_bytes, t.tokens_uri, t.tokens_digest
FROM unnest(CAST(:ids AS uuid[]), CAST(:nos AS integer[])) AS k (rollout_id, attempt_no)
JOIN attempts a USING (rollout_id, attempt_no) JOIN trajectories t USING (rollout_id, attempt_no)
JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = r.run_id
""").execution_options(**{BINARY: True})

_OF_THE_LABEL = ("slug", "group_no", "rollout_index")


def read_unscored(
    connection: Connection, keys: Sequence[AttemptKey]
) -> dict[AttemptKey, Completion]:
    """Return the completions of these attempts, which have a trajectory and no reward."""
    found = [_completion(row) for row in connection.execute(_READ, key_arrays(keys)).mappings()]
    return {completion.key: completion for completion in found}


def _completion(row: Any) -> Completion:
    fields: dict[str, Any] = {name: row[name] for name in row if name not in _OF_THE_LABEL}
    run, group_no, rollout_index = (row[name] for name in _OF_THE_LABEL)
    fields |= {
        "label": label_of(run, group_no, rollout_index, row["attempt_no"]),
        "worker_id": row["worker_id"] or "",
        "body": bytes(row["body"] or b""),
        "tokens": bytes(row["tokens"] or b""),
        "tokens_bytes": row["tokens_bytes"] or 0,
    }
    return Completion(**fields, purpose="unscored", outcome="succeeded")
