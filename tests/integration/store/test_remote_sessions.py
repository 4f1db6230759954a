"""Sessions of remote agents in the store: opened with their claim, handed over, stopped."""

from __future__ import annotations

import importlib

import pytest
from fixtures.collectors import StoredCollector
from fixtures.stored_run import StoredRun
from sqlalchemy import text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import Completion, ErrorRecord
from pipeline.store.engine import transact
from pipeline.store.remote_sessions import (
    attempts_named,
    close_sessions,
    count_sessions,
    hand_over,
    open_sessions,
    take_stoppable,
    waiting_attempts,
)
from pipeline.store.schema import head, upgrade
from pipeline.store.status import run_stats, run_status

TARGET = {
    "target": "arn:aws:bedrock-agentcore:us-west-2:1:runtime/x",
    "results_bucket": "b",
    "session_timeout_s": 60.0,
}


@pytest.fixture
def story(engine):
    return StoredRun(engine, prompts=2, n=2, agent="agentcore", reward=None, agentcore=TARGET)


def handover(story, attempt):
    done = story.succeeded(attempt)
    fields = {name: getattr(done, name) for name in ("run_id", "group_id", "rollout_id", "label")}
    return Completion(
        **fields,
        attempt_no=done.attempt_no,
        worker_id="w",
        purpose="handover",
        outcome="succeeded",
    )


def test_a_session_counts_from_its_claim_until_it_is_stopped(engine, story):
    claimed = story.claim(3)
    transact(engine, lambda c: open_sessions(c, story.run, claimed))
    assert transact(engine, count_sessions) == 3
    transact(engine, lambda c: hand_over(c, [handover(story, a) for a in claimed]))
    waiting = transact(engine, lambda c: waiting_attempts(c, ()))
    assert len(waiting) == 3
    assert not any(attempt.is_overdue for attempt in waiting)
    # A heartbeat from before the handover shortens no lease.
    story.beat(claimed[0])
    leases = story.rows(
        "SELECT lease_until > now() + interval '5 minutes' AS is_long FROM attempts"
    )
    assert [row["is_long"] for row in leases] == [True] * 3

    story.record(story.succeeded(claimed[0], 1.0))
    keys = [(claimed[0].rollout_id, claimed[0].attempt_no)]
    assert transact(engine, lambda c: attempts_named(c, keys)) == []
    options = {"runs": (), "most": 10, "late_s": 30.0}
    (stoppable,) = transact(engine, lambda c: take_stoppable(c, **options))
    assert (stoppable.rollout_id, stoppable.may_start_late) == (claimed[0].rollout_id, False)
    assert transact(engine, lambda c: take_stoppable(c, **options)) == []
    transact(engine, lambda c: close_sessions(c, keys))
    assert transact(engine, count_sessions) == 2

    # A worker that invoked the session after it was stopped: it has to be stopped again.
    transact(engine, lambda c: hand_over(c, [handover(story, claimed[0])]))
    assert transact(engine, count_sessions) == 3


def test_a_session_is_overdue_after_its_time(engine, story):
    (attempt,) = story.claim(1)
    transact(engine, lambda c: open_sessions(c, story.run, [attempt]))
    transact(engine, lambda c: hand_over(c, [handover(story, attempt)]))
    later = text("UPDATE attempts SET lease_until = lease_until - interval '61 seconds'")
    transact(engine, lambda c: c.execute(later))
    (waiting,) = transact(engine, lambda c: waiting_attempts(c, ()))
    assert waiting.is_overdue


def test_a_status_names_used_up_sessions_and_throttled_calls(engine, story):
    claimed = story.claim(3)
    transact(engine, lambda c: open_sessions(c, story.run, claimed))
    StoredCollector(engine).report(max_sessions=3)
    (queued,) = [s for s in waits(engine, story) if "queued" in s]
    assert "all 3 sessions" in queued
    assert "3 by this run and 0 by other runs" in queued

    error = ErrorRecord(
        error_class=ErrorClass.MODEL_RATE_LIMIT, code="throttled", message="m", retry_after_s=60.0
    )
    story.record(story.failed(claimed[0], error=error))
    assert "; 1 of them have ended and wait for their stop" in " ".join(waits(engine, story))
    keys = [(claimed[0].rollout_id, claimed[0].attempt_no)]
    transact(engine, lambda c: close_sessions(c, keys))
    told = " ".join(waits(engine, story))
    assert "for 1 of them AgentCore throttled the call, which uses no attempt" in told
    assert "all 3 sessions" not in told


def waits(engine, story):
    status = transact(engine, lambda c: run_status(c, story.run))
    assert transact(engine, lambda c: run_stats(c, story.run)).waits == status.waits
    return status.waits


def test_a_store_in_use_gets_the_table_of_sessions_and_keeps_its_rows(engine):
    downgrade = importlib.import_module("test_schema").downgrade
    story = StoredRun(engine, prompts=2, n=2)
    story.record(story.succeeded(story.claim_one(), 1.0))
    before = story.everything()
    downgrade(engine, "0014")
    assert upgrade(engine) == head()
    assert story.everything() == before
    assert transact(engine, count_sessions) == 0
