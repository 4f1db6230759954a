"""What the database itself refuses, and how errors of its server are told."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from fixtures.stored_run import StoredRun
from sqlalchemy import text

from pipeline.contract.errors import (
    ConfigError,
    StoreRejected,
    StoreUnavailable,
)
from pipeline.store.engine import open_engine, transact
from pipeline.store.schema import require_current


def test_a_server_that_does_not_answer_is_named_without_its_password():
    engine = open_engine("postgresql://me:hunter2@127.0.0.1:1/x")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1.*ROLLOUT_DATABASE__URL") as caught:
        require_current(engine)
    assert "hunter2" not in str(caught.value)
    engine.dispose()


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite:///x.db"])
def test_another_database_than_postgres_is_refused(url):
    with pytest.raises(ConfigError, match="needs PostgreSQL"):
        open_engine(url)


@pytest.mark.parametrize("state", ["queued", "dispatched", "running", "failed", "cancelled"])
def test_the_database_refuses_a_reward_without_a_success(engine, state):
    StoredRun(engine)
    with pytest.raises(StoreRejected, match="rollouts_reward_is_earned"):
        transact(
            engine,
            lambda c: c.execute(
                text("UPDATE rollouts SET state = :state, reward = 0"), {"state": state}
            ),
        )


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity"])
def test_the_database_refuses_a_reward_that_is_no_number(engine, reward):
    StoredRun(engine)
    with pytest.raises(StoreRejected, match="rollouts_reward_is_finite"):
        transact(
            engine,
            lambda c: c.execute(
                text("UPDATE rollouts SET state = 'succeeded', reward = CAST(:reward AS float8)"),
                {"reward": reward},
            ),
        )


def test_the_database_refuses_counters_beyond_the_group(engine):
    StoredRun(engine, n=2)
    with pytest.raises(StoreRejected, match="groups_counters"):
        transact(engine, lambda c: c.execute(text("UPDATE groups SET n_failed = 3")))


@pytest.mark.parametrize("through", ["a statement", "a copy"])
def test_a_full_disk_of_the_server_is_said_to_be_one(engine, through):
    raised = "DO $$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full'; END $$"

    def work(connection: sa.Connection) -> None:
        if through == "a statement":
            connection.execute(text(raised))
        # COPY goes past SQLAlchemy, and so do its errors.
        connection.connection.cursor().execute(raised)

    with pytest.raises(StoreUnavailable, match=r"The disk of Postgres .* is full\. no space left"):
        transact(engine, work)
