"""A cancelled run gets no work any more, whatever happens at the same time."""

from __future__ import annotations

import threading

import pytest
from fixtures.stored_run import SOURCE, StoredRun, payload
from fixtures.waiting import wait_until
from sqlalchemy import Engine, text

from pipeline.contract.errors import ErrorClass, NotAllowed
from pipeline.store.engine import transact
from pipeline.store.operations import begin_cancel, cancel_rollouts
from pipeline.store.outcomes import record_outcomes
from pipeline.store.prompts import add_prompts


def cancel(story: StoredRun) -> None:
    transact(story.engine, lambda c: begin_cancel(c, story.run))
    while transact(story.engine, lambda c: cancel_rollouts(c, story.run)):
        pass


def waits_for_a_lock(engine: Engine) -> bool:
    query = text("""
        SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE NOT granted AND datname = current_database()
    """)
    with engine.connect() as connection:
        return connection.execute(query).scalar_one() > 0


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    """A run that replaces failed rollouts; one of its two rollouts is good, the other in flight."""
    story = StoredRun(engine, prompts=2, n=1, replacements=1)
    story.record(story.succeeded(story.claim_one()))
    return story


def left_over(story: StoredRun) -> set[str]:
    states = set(story.states()) | {group["state"] for group in story.groups()}
    return states & {"queued", "dispatched", "running", "open"}


def test_a_replacement_under_way_is_cancelled_with_its_run(engine: Engine, story: StoredRun):
    failed = story.failed(story.claim_one(), ErrorClass.CONTRACT)
    canceller = threading.Thread(target=cancel, args=(story,))
    with engine.begin() as connection:
        record_outcomes(connection, [failed])
        canceller.start()
        wait_until(lambda: waits_for_a_lock(engine), what="the cancel to wait")
    canceller.join(20)
    assert story.states() == {"succeeded": 1, "failed": 1, "cancelled": 1}
    assert left_over(story) == set()


def test_a_cancelled_run_replaces_nothing(engine: Engine, story: StoredRun):
    failed = story.failed(story.claim_one(), ErrorClass.CONTRACT)
    transact(engine, lambda c: begin_cancel(c, story.run))
    story.record(failed)
    assert story.states() == {"succeeded": 1, "failed": 1}
    assert left_over(story) == set()


def test_a_cancelled_run_takes_no_prompts(engine: Engine, story: StoredRun):
    cancel(story)
    before = story.everything()
    with pytest.raises(NotAllowed, match="--cancelled"):
        transact(engine, lambda c: add_prompts(c, story.run, SOURCE, [(7, payload(7))]))
    assert story.everything() == before


def test_prompts_under_way_are_cancelled_with_their_run(engine: Engine, story: StoredRun):
    story.record(story.succeeded(story.claim_one()))
    canceller = threading.Thread(target=cancel, args=(story,))
    with engine.begin() as connection:
        add_prompts(connection, story.run, SOURCE, [(7, payload(7))])
        canceller.start()
        wait_until(lambda: waits_for_a_lock(engine), what="the cancel to wait")
    canceller.join(20)
    assert story.states() == {"succeeded": 2, "cancelled": 1}
    assert left_over(story) == set()
