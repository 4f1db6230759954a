"""A run's elapsed time is its working time: pauses and times without a controller do not count."""

from __future__ import annotations

import pytest
from alembic import command
from alembic.config import Config
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.store.engine import transact
from pipeline.store.operations import continue_run, pause_run
from pipeline.store.schema import MIGRATIONS
from pipeline.store.status import run_status
from pipeline.store.working_time import MOST_GAP_S, advance_clocks

#: The statements take a moment, too.
NEAR_S = 2.0


def elapsed_s(story: StoredRun) -> float:
    return transact(story.engine, lambda c: run_status(c, story.run)).elapsed_s


def pass_time(story: StoredRun, seconds: float) -> None:
    """Let all that happened to the run be longer ago."""
    shift = f"interval '{seconds} seconds'"
    with story.engine.begin() as connection:
        connection.execute(
            text(
                f"UPDATE runs SET worked_at = worked_at - {shift},"
                f" created_at = created_at - {shift}"
            )
        )
        connection.execute(text(f"UPDATE rollouts SET finished_at = finished_at - {shift}"))
        connection.execute(
            text(f"UPDATE rollout_tallies SET last_finished_at = last_finished_at - {shift}")
        )


def work(story: StoredRun, seconds: int) -> None:
    """Let a controller work on it for so long."""
    transact(story.engine, advance_clocks)
    for _ in range(seconds // 5):
        pass_time(story, 5)
        transact(story.engine, advance_clocks)


def test_time_with_a_controller_counts_and_time_without_does_not(engine: Engine):
    story = StoredRun(engine, prompts=2)
    work(story, 60)
    assert elapsed_s(story) == pytest.approx(60, abs=NEAR_S)
    pass_time(story, 3600)
    assert elapsed_s(story) == pytest.approx(60 + MOST_GAP_S, abs=NEAR_S)
    work(story, 60)
    assert elapsed_s(story) == pytest.approx(120 + MOST_GAP_S, abs=NEAR_S)


def test_a_pause_does_not_count(engine: Engine):
    story = StoredRun(engine, prompts=2)
    work(story, 30)
    pass_time(story, 4)
    transact(engine, lambda c: pause_run(c, story.run))
    work(story, 60)
    assert elapsed_s(story) == pytest.approx(34, abs=NEAR_S)
    transact(engine, lambda c: continue_run(c, story.run))
    assert elapsed_s(story) == pytest.approx(34, abs=NEAR_S)
    pass_time(story, 5)
    assert elapsed_s(story) == pytest.approx(39, abs=NEAR_S)


def test_the_clock_of_a_finished_run_stopped_with_its_last_outcome(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1)
    claimed = story.claim_one()
    pass_time(story, 3)
    story.record(story.succeeded(claimed))
    for _ in range(2):
        work(story, 60)
        assert elapsed_s(story) == pytest.approx(3, abs=NEAR_S)


def test_runs_of_the_previous_schema_keep_their_times(engine: Engine):
    done, left = StoredRun(engine, prompts=1, n=1), StoredRun(engine, prompts=1, n=1)
    pass_time(done, 40)
    done.record(done.succeeded(done.claim_one()))
    pass_time(done, 7200)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0006-1")
        command.upgrade(config, "head")
    assert elapsed_s(done) == pytest.approx(40, abs=NEAR_S)
    assert elapsed_s(left) == pytest.approx(MOST_GAP_S, abs=NEAR_S), "nobody worked on it"
    work(left, 20)
    assert elapsed_s(left) == pytest.approx(20 + MOST_GAP_S, abs=NEAR_S)
