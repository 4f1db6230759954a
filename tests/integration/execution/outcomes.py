"""The outcome of a run of one rollout that its worker has worked off."""

from __future__ import annotations

from typing import Any

from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun

from pipeline.store.accounting import check_accounting


def outcome(story: StoredRun, worker: ScriptedWorker) -> tuple[Any, ...]:
    """Work off a story with one rollout; return its state, reward, class and code."""
    worker.work_off(story)
    with story.engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []
    (rollout,) = story.rollouts()
    attempts = story.rows("SELECT * FROM attempts WHERE run_id = :run_id ORDER BY attempt_no")
    last = attempts[-1]
    return rollout["state"], rollout["reward"], rollout["error_class"], last["error_code"]
