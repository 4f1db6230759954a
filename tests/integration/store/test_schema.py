"""Migrations of empty databases and of stores in use."""

from __future__ import annotations

import importlib
import pkgutil
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from fixtures.collectors import StoredCollector
from fixtures.servers import PrivateServers
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text
from sqlalchemy.dialects import postgresql

from pipeline import store
from pipeline.contract.errors import SchemaOutdated, UnreadableBody
from pipeline.contract.messages import JournalFrame
from pipeline.contract.run import RunOrigin
from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import digest_of
from pipeline.queue.claim_checks import check_out
from pipeline.queue.payloads import FolderPayloads
from pipeline.store.accounting import check_accounting
from pipeline.store.engine import open_engine, transact
from pipeline.store.journals import add_frames
from pipeline.store.leases import silent_attempts
from pipeline.store.processes import list_processes
from pipeline.store.rescore_requests import request_rescores
from pipeline.store.runs import get_run
from pipeline.store.schema import MIGRATIONS, current, head, require_current, upgrade
from pipeline.store.watermark import read_watermark
from pipeline.trainer.client import TrainerClient


@pytest.fixture
def empty(servers: PrivateServers) -> Iterator[Engine]:
    """A database without any table."""
    url = servers.create_database(migrated=False)
    engine = open_engine(url)
    yield engine
    engine.dispose()
    servers.drop_database(url)


def statements() -> Iterator[tuple[str, sa.TextClause]]:
    """Every named statement of the store and the export."""
    names = [f"pipeline.store.{module.name}" for module in pkgutil.iter_modules(store.__path__)]
    for name in [*names, "pipeline.trainer.export"]:
        for attribute, value in vars(importlib.import_module(name)).items():
            if isinstance(value, sa.TextClause):
                yield f"{name}.{attribute}", value


def test_a_migrated_database_can_prepare_every_statement_of_the_code(engine):
    numbered = postgresql.dialect(paramstyle="numeric_dollar")
    found = dict(statements())
    assert len(found) > 60, "the statements are where this test looks for them"
    with engine.connect() as connection:
        connection.execute(found.pop("pipeline.store.prompts._STAGING"))
        cursor = connection.connection.cursor()
        for name, statement in found.items():
            sql = str(statement.compile(dialect=numbered))
            cursor.execute(f'PREPARE "{name[-60:]}" AS {sql}', prepare=False)


def test_the_architecture_lists_every_table(engine):
    page = Path(__file__).parents[3] / "docs" / "architecture.md"
    section = page.read_text().partition("## Tables")[2].partition("\n## ")[0]
    cells = (line.split(" | ")[0] for line in section.splitlines() if line.startswith("| "))
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert listed == set(sa.inspect(engine).get_table_names()) - {"alembic_version"}


def downgrade(engine: Engine, revision: str) -> None:
    with engine.connect() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


def columns(engine: Engine) -> dict[str, dict[str, tuple[str, bool]]]:
    """Type and nullability of every column, by table."""
    inspector = sa.inspect(engine)
    return {
        table: {
            column["name"]: (str(column["type"]), column["nullable"])
            for column in inspector.get_columns(table)
        }
        for table in inspector.get_table_names()
    }


def test_a_store_in_use_loses_unread_columns_and_nothing_else(engine):
    story = StoredRun(engine, prompts=3, n=2, n_min=1, limits={"timeout_s": 7.5}, max_in_flight=9)
    first, second, third, *_ = story.claim(4)
    story.record(story.failed(first), story.succeeded(second, 0.5), story.succeeded(third, 0.25))
    story.record(story.succeeded(story.claim_one(), 1.0))
    trainer = TrainerClient(engine, run=story.run.slug)
    leased = [group.group_id for group in trainer.pull(0, BatchSpec(groups=1)).groups]
    trainer.close()
    now, before = columns(engine), story.everything()
    for row in before["trajectories"]:
        row["body_digest"] = None  # a later revision's column, forgotten by the downgrade

    downgrade(engine, "0006")
    (run,) = story.rows("SELECT name, purpose, max_in_flight FROM runs")
    assert run == {"name": story.run.slug, "purpose": "train", "max_in_flight": 9}
    assert {row["timeout_s"] for row in story.rollouts()} == {7.5}
    in_batch = [row["group_id"] for row in story.groups() if row["train_batch_id"]]
    assert in_batch == leased
    transact(engine, lambda c: c.execute(text("UPDATE rollouts SET cancel_requested = true")))

    assert upgrade(engine) == head()
    assert columns(engine) == now
    assert story.everything() == before
    story.record(*(story.succeeded(attempt) for attempt in story.claim()))
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def test_trajectories_of_the_schema_before_are_kept_and_new_ones_get_a_digest(engine):
    story = StoredRun(engine, prompts=2, n=2)
    *early, late = story.claim(4)
    story.record(*(story.succeeded(attempt) for attempt in early))
    story.beat(late)
    before = story.everything()

    downgrade(engine, "0007")
    assert all("body_digest" not in row for row in story.everything()["trajectories"])
    assert upgrade(engine) == head()

    after = story.everything()
    digests = [row.pop("body_digest") for row in before["trajectories"]]
    assert [row.pop("body_digest") for row in after["trajectories"]] == [None] * 3
    assert after == before
    completion = story.succeeded(late)
    assert completion.body_digest in digests
    story.record(completion)
    stored = story.rows("SELECT body_digest FROM trajectories WHERE body_digest IS NOT NULL")
    assert stored == [{"body_digest": completion.body_digest}]
    trainer = TrainerClient(engine, run=story.run.slug)
    assert all(r.messages for r in trainer.pull(0, BatchSpec(groups=2)).rollouts())
    trainer.close()


def test_a_batch_leased_under_the_schema_before_does_not_change(engine, tmp_path):
    """A trainer may have it, so an unreadable trajectory is an error and drops no group."""
    story = StoredRun(engine, prompts=2, n=1, n_min=1)
    payloads = FolderPayloads(tmp_path)
    story.record(*(check_out(story.succeeded(a), payloads) for a in story.claim()))
    trainer = TrainerClient(engine, run=story.run.slug, payloads=payloads)
    leased = trainer.pull(0, BatchSpec(groups=1, min_group_size=1)).groups
    downgrade(engine, "0008")
    assert upgrade(engine) == head()
    assert trainer.pull(0).groups == leased
    first, _ = sorted(tmp_path.rglob("*.frame"), key=lambda path: "-g000000-" not in path.name)
    first.unlink()
    with pytest.raises(UnreadableBody):
        trainer.pull(0)
    assert [group["state"] for group in story.groups()] == ["leased", "ready"]
    trainer.close()


def test_a_store_in_use_gets_the_indexes_of_open_rows(engine):
    story = StoredRun(engine, prompts=2, n=2)
    story.record(story.succeeded(story.claim_one()))
    running = story.claim_one()
    before = story.everything()
    downgrade(engine, "0009")
    assert upgrade(engine) == head()
    assert story.everything() == before
    story.record(story.succeeded(running), *(story.succeeded(a) for a in story.claim()))
    assert [group["state"] for group in story.groups()] == ["ready", "ready"]


def test_rollouts_lost_under_the_schema_before_are_isolated_and_have_no_deaths(engine):
    story = StoredRun(engine, prompts=3, max_lost=2)
    often, once, running = story.claim()
    story.record(story.lost(often), story.lost(once))
    (again,) = [each for each in story.claim() if each.rollout_id == often.rollout_id]
    story.record(story.lost(again))
    story.beat(running)
    before = story.everything()

    downgrade(engine, "0010")
    assert all("died_count" not in row for row in story.rollouts())
    assert upgrade(engine) == head()

    assert story.everything() == before
    assert {row["died_count"] for row in story.rollouts()} == {0}
    (third,) = story.claim(1)
    assert (third.rollout_id, third.lost_count) == (often.rollout_id, 2)
    story.record(story.died(third), story.succeeded(running))
    (fourth,) = [each for each in story.claim() if each.rollout_id == often.rollout_id]
    story.record(story.died(fourth))
    assert story.rollout(often)["error_class"] == "poison"


def test_a_store_in_use_takes_requests_for_rescores(engine):
    story = StoredRun(engine, prompts=2, n=1, n_min=1)
    story.record(story.succeeded(story.claim_one()))
    running = story.claim_one()
    before = story.everything()
    downgrade(engine, "0011")
    assert upgrade(engine) == head()
    assert story.everything() == before
    asked = {"error_class": None, "queue": "rollouts", "awaited": False}
    assert transact(engine, lambda c: request_rescores(c, story.run, "judge", **asked)) == 1
    story.record(story.succeeded(running))
    assert story.states() == {"succeeded": 2}


def test_a_run_in_flight_is_judged_after_the_upgrade_to_markers(engine):
    story = StoredRun(engine, prompts=2)
    held, finished = story.claim()
    story.beat(held, finished)
    story.record(story.succeeded(finished))
    before = story.everything()
    downgrade(engine, "0012")
    for name in ("crashed", "stopped"):
        add = text(
            "INSERT INTO processes (process_id, kind, read_up_to)"
            " VALUES (:name, 'collector', now())"
        )
        transact(engine, lambda c, add=add, name=name: c.execute(add, {"name": name}))

    assert upgrade(engine) == head()
    assert story.everything() == before
    assert transact(engine, read_watermark) is None
    collector = StoredCollector(engine)
    # The collectors from before the upgrade are not waited for.
    assert collector.catch_up() == collector.watermark()
    transact(engine, lambda c: c.execute(text("UPDATE attempts SET lease_until = 'epoch'")))
    collector.catch_up()
    watermark = collector.watermark()
    assert watermark is not None
    silent = transact(
        engine,
        lambda c: silent_attempts(
            c,
            watermark=watermark,
            departed={},
            expire=False,
            grace_s=0.0,
            most=10,
        ),
    )
    assert [attempt.rollout_id for attempt in silent] == [held.rollout_id]


def test_trajectories_of_the_schema_before_have_no_tokens_and_new_ones_have_theirs(engine):
    story = StoredRun(engine, prompts=2, n=2)
    early, *late = story.claim(3)
    story.record(story.succeeded(early))
    story.beat(*late)
    before = story.everything()
    downgrade(engine, "0013")
    assert "tokens" not in story.everything()["trajectories"][0]

    assert upgrade(engine) == head()
    assert story.everything() == before
    fields = {"tokens": b"ids", "tokens_bytes": 3, "tokens_digest": digest_of(b"ids")}
    story.record(*(story.succeeded(attempt, **fields) for attempt in late))
    stored = story.rows(
        "SELECT attempt_no, tokens, tokens_uri, tokens_digest, tokens_bytes FROM trajectories"
        " ORDER BY tokens_bytes"
    )
    kept = {"attempt_no": 1, "tokens": b"ids", "tokens_uri": None, "tokens_bytes": 3}
    none = dict.fromkeys(("tokens", "tokens_uri", "tokens_digest", "tokens_bytes"))
    assert stored == [kept | {"tokens_digest": digest_of(b"ids")}] * 2 + [{"attempt_no": 1} | none]
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def test_attempts_in_flight_record_calls_after_the_upgrade_to_journals(engine):
    story = StoredRun(engine, prompts=2)
    running, finished = story.claim()
    story.beat(running, finished)
    story.record(story.succeeded(finished))
    before = story.everything()
    downgrade(engine, "0017")
    assert "calls_replayed" not in story.everything()["attempts"][0]

    assert upgrade(engine) == head()
    assert story.everything() == before
    frame = {"first": 0, "n_calls": 1, "body": b"calls"}
    kept = JournalFrame(**story.succeeded(running).identity, **frame)
    assert transact(engine, lambda c: add_frames(c, [kept])) == 1
    replays = {"calls_replayed": 3, "replayed_from": (1, 2), "tokens_saved": 70}
    story.record(story.succeeded(running, **replays))
    row = story.attempt(running)
    assert (row["calls_replayed"], row["replayed_from"], row["tokens_saved"]) == (3, [1, 2], 70)


def test_calls_of_workers_outlive_the_upgrade_and_the_downgrade_of_gateways(engine):
    story = StoredRun(engine, prompts=1)
    attempt = story.claim_one()
    identity = story.succeeded(attempt).identity

    def keep(first: int) -> int:
        frame = JournalFrame(**identity, first=first, n_calls=1, body=b"calls")
        return transact(engine, lambda c: add_frames(c, [frame]))

    assert (keep(3), keep(1_764_000_000_000_000_000)) == (1, 1)
    downgrade(engine, "0019")
    assert upgrade(engine) == head()
    assert [row["first_call"] for row in story.rows("SELECT first_call FROM journals")] == [3]


def test_a_store_in_use_forgets_and_learns_which_trajectories_wait_for_a_reward(engine):
    story = StoredRun(engine, prompts=3)
    first, second = story.claim(2)
    story.record(story.succeeded(first, 0.5))
    story.record(story.succeeded(second, None, purpose="unscored"))
    now, before = columns(engine), story.everything()
    downgrade(engine, "0020")
    assert "unscored_no" not in columns(engine)["rollouts"]
    assert upgrade(engine) == head()
    for row in before["rollouts"]:
        row["unscored_no"] = None
    assert (columns(engine), story.everything()) == (now, before)
    assert story.claim_one().unscored_no is None, "its agent runs again"


def test_an_empty_database_is_refused_with_the_command_that_helps(empty):
    with pytest.raises(SchemaOutdated, match=r"schema none.*rollout db upgrade"):
        require_current(empty)


def test_an_upgrade_makes_the_database_usable_and_can_be_repeated(empty):
    assert current(empty) is None
    assert upgrade(empty) == upgrade(empty) == current(empty) == head()
    require_current(empty)


def test_a_database_of_a_later_version_is_refused(engine):
    transact(engine, lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(SchemaOutdated, match="9999"):
        require_current(engine)


def test_a_store_of_the_schema_before_keeps_its_runs_and_processes(engine):
    downgrade(engine, "0004")
    story = [
        "INSERT INTO processes (process_id, kind, capacity) VALUES ('w0', 'worker', 4)",
        "INSERT INTO runs (run_id, slug, name, purpose, config, config_digest) VALUES "
        """('00000000-0000-0000-0000-000000000007', 'old', 'old', 'train', '{"n": 3}', 'x')""",
    ]
    for statement in story:
        transact(engine, lambda c, statement=statement: c.execute(text(statement)))
    assert upgrade(engine) == head()
    (process,) = transact(engine, list_processes)
    assert (process.queues, process.base_urls) == ((), ())
    run = transact(engine, lambda c: get_run(c, "old"))
    assert (run.config.n, run.config.base_url, run.origin) == (3, None, RunOrigin())


def test_processes_that_upgrade_at_once_do_not_meet(empty):
    engines = [open_engine(empty.url.render_as_string(hide_password=False)) for _ in range(4)]
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda one=one: results.append(upgrade(one))) for one in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in engines:
        one.dispose()
    assert results == [head()] * 4


def test_a_store_of_the_schema_before_gets_policies_and_keeps_everything(engine):
    story = StoredRun(engine, prompts=3, n=2)
    story.record(*(story.succeeded(attempt) for attempt in story.claim(4)))
    trainer = TrainerClient(engine, run=story.run.slug)
    trainer.pull(0, BatchSpec(groups=1))
    trainer.publish_policy(3, uri="file:///w3", mode="pause")
    now, before = columns(engine), story.everything()

    downgrade(engine, "0016")
    (published,) = story.rows("SELECT version, weights_uri FROM policy_versions")
    assert published == {"version": 3, "weights_uri": "file:///w3"}
    assert upgrade(engine) == head()

    assert (columns(engine), story.everything()) == (now, before)
    assert trainer.publish_policy(4)
    batch = trainer.pull(1, BatchSpec(groups=1, max_staleness=0), policy_version=0)
    assert [group.group_no for group in batch.groups] == [1]
    trainer.close()
