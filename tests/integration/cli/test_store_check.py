"""`rollout db check --run`: rows of a run that contradict each other are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, servers_of
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.contract.errors import AccountingBroken
from pipeline.store.accounting import require_accounting
from pipeline.store.engine import transact


def test_a_run_whose_rows_agree_passes_and_a_counter_that_lies_is_named(
    engine: Engine, database_url: str, redis_place: BrokerPlace, tmp_path: Path
):
    rollout = CommandLine(tmp_path, **servers_of(database_url, redis_place))
    story = StoredRun(engine, prompts=2, n=2, slug="checked")
    story.record(*(story.succeeded(attempt) for attempt in story.claim()))
    assert "checked" in rollout("db", "check", "--run", "checked").out
    with engine.begin() as connection:
        connection.execute(text("UPDATE groups SET n_succeeded = 1 WHERE group_no = 1"))

    assert rollout.error("db", "check", "--run", "checked") == (1, "E307")
    with pytest.raises(AccountingBroken, match="group g000001 says 1 of 2 rollouts ended well"):
        transact(engine, require_accounting, story.run)
