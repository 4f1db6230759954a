"""Two services say the same thing at the same time: the second sees what the first wrote. C17."""

import threading
from collections.abc import Callable

import pytest
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from sqlalchemy import Engine, text

from pipeline.contract.messages import Completion
from pipeline.store.outcomes import OutcomeReport, record_outcomes
from pipeline.store.rollouts import ClaimedAttempt


@pytest.fixture
def say_twice(engine: Engine) -> Callable[[Completion], OutcomeReport]:
    """Record a completion while another service has recorded it and not yet committed."""

    def say(completion: Completion) -> OutcomeReport:
        reports: list[OutcomeReport] = []

        def record() -> None:
            with engine.begin() as connection:
                reports.append(record_outcomes(connection, [completion]))

        second = threading.Thread(target=record)
        with engine.begin() as connection:
            record_outcomes(connection, [completion])
            second.start()
            wait_until(lambda: waits_for_a_lock(engine), what="the second one to wait")
        second.join(20)
        return reports[0]

    return say


def waits_for_a_lock(engine: Engine) -> bool:
    query = text("""
        SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE NOT granted AND datname = current_database()
    """)
    with engine.connect() as connection:
        return connection.execute(query).scalar_one() > 0


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    return StoredRun(engine, n=2)


@pytest.fixture
def attempt(story: StoredRun) -> ClaimedAttempt:
    return story.claim_one()


def test_an_outcome_that_two_collectors_bring_at_once_is_recorded_once(story, attempt, say_twice):
    report = say_twice(story.succeeded(attempt))
    assert report.duplicate == 1
    assert story.attempt(attempt)["state"] == "succeeded"
    assert story.rollout(attempt)["winner_attempt_no"] == attempt.attempt_no


def test_an_error_that_two_collectors_bring_at_once_is_counted_once(story, attempt, say_twice):
    report = say_twice(story.failed(attempt))
    assert report.duplicate == 1
    assert story.attempt(attempt)["state"] == "failed"
    assert story.rollout(attempt)["attempts_used"] == 1


def test_an_attempt_that_two_reconcilers_give_up_at_once_is_lost_once(story, attempt, say_twice):
    report = say_twice(story.lost(attempt))
    assert report.duplicate == 1
    assert story.attempt(attempt)["state"] == "lost"
    assert story.rollout(attempt)["lost_count"] == 1
