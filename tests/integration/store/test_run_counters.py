"""Run counters: after every kind of change to rollouts, they equal the sums over the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from fixtures.brokers import BrokerPlace
from fixtures.stored_run import StoredRun
from sqlalchemy import Connection, Engine, text

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import RolloutState
from pipeline.queue.broker import broker_of
from pipeline.queue.payloads import open_payloads
from pipeline.reconciler import Reconciler
from pipeline.settings import Settings
from pipeline.store.accounting import check_accounting
from pipeline.store.engine import transact
from pipeline.store.operations import begin_cancel, cancel_rollouts, retry_rollouts
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.run_counters import fold_run_counters
from pipeline.store.run_errors import errors_by_class, errors_by_worker
from pipeline.store.schema import MIGRATIONS
from pipeline.store.status import run_status


@pytest.fixture
def story(engine: Engine) -> Iterator[StoredRun]:
    """A run that is held against its rows in the end."""
    story = StoredRun(engine, prompts=3, n=4, n_min=1, max_attempts=2, max_lost=2)
    yield story
    assert figures(story) == counted(story)
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def figures(story: StoredRun) -> dict[str, Any]:
    """What status says, as far as it can be counted."""
    found = transact(story.engine, lambda c: run_status(c, story.run))
    return {
        "rollouts": {s: n for s, n in found.rollouts.items() if n and s != "total"},
        "groups": {s: n for s, n in found.groups.items() if n},
        "errors": found.errors,
        "reward": (found.reward_n, found.reward_mean, found.reward_std),
        "prompts": (found.reward_prompts, found.reward_stderr),
        "attempts": (found.attempts, found.prompt_tokens, found.completion_tokens),
        "with tokens": found.with_tokens,
    }


def counted(story: StoredRun) -> dict[str, Any]:
    """The same, out of the rows."""

    def by(column: str, table: str, where: str = "true") -> dict[str, int]:
        query = f"SELECT {column} AS key, count(*) AS n FROM {table} WHERE run_id = :run_id"
        return {row["key"]: row["n"] for row in story.rows(f"{query} AND {where} GROUP BY 1")}

    (reward,) = story.rows(
        "SELECT count(reward) AS n, avg(reward) AS mean, stddev_pop(reward) AS std FROM rollouts"
        " WHERE run_id = :run_id"
    )
    by_group = story.rows(
        "SELECT count(reward) AS n, sum(reward) AS s FROM rollouts WHERE run_id = :run_id"
        " AND reward IS NOT NULL GROUP BY group_id"
    )
    (attempts,) = story.rows(
        "SELECT count(*) AS n, coalesce(sum(prompt_tokens), 0) AS prompt,"
        " coalesce(sum(completion_tokens), 0) AS completion FROM attempts WHERE run_id = :run_id"
    )
    (ids,) = story.rows(
        "SELECT count(*) AS n FROM rollouts r JOIN trajectories t ON t.rollout_id = r.rollout_id"
        " AND t.attempt_no = r.winner_attempt_no"
        " WHERE r.run_id = :run_id AND (t.tokens IS NOT NULL OR t.tokens_uri IS NOT NULL)"
    )
    return {
        "rollouts": by("state", "rollouts"),
        "groups": by("state", "groups"),
        "errors": by("error_class", "rollouts", "state = 'failed'"),
        "reward": (reward["n"], pytest.approx(reward["mean"]), pytest.approx(reward["std"])),
        "prompts": (len(by_group), clustered([(row["n"], row["s"]) for row in by_group])),
        "attempts": (attempts["n"], attempts["prompt"], attempts["completion"]),
        "with tokens": ids["n"],
    }


def clustered(groups: list[tuple[int, float]]) -> Any:
    """The standard error of the mean over groups of (number, sum), as its definition says."""
    if len(groups) < 2:
        return None
    n, total = sum(n for n, _ in groups), sum(s for _, s in groups)
    squares = sum((s - total / n * n_g) ** 2 for n_g, s in groups)
    return pytest.approx((len(groups) / (len(groups) - 1) * squares) ** 0.5 / n, abs=1e-9)


def n_rows(story: StoredRun) -> int:
    return story.rows("SELECT count(*) AS n FROM rollout_tallies WHERE run_id = :run_id")[0]["n"]


def test_a_retry_and_its_success_are_counted_once(story: StoredRun):
    first, second = story.claim(2)
    story.beat(first, second)
    story.record(story.failed(first), story.succeeded(second, 0.1))
    story.record(story.succeeded(story.claim_one(), 0.7))


def test_a_late_success_takes_the_place_of_the_attempt_that_overtook_it(story: StoredRun):
    late = story.claim_one()
    story.record(story.lost(late))
    newer = story.claim_one()
    assert newer.rollout_id == late.rollout_id
    story.record(story.succeeded(late, 0.3))
    story.record(story.succeeded(newer, 0.9))
    assert story.attempt(newer)["state"] == "superseded"


def test_a_rollout_counts_as_one_with_tokens_by_the_trajectory_of_its_winner(story: StoredRun):
    first, second, third, fourth = story.claim(4)
    story.record(
        story.succeeded(first, tokens=b"ids"),
        story.succeeded(second, tokens_uri="file:///ids"),
        story.succeeded(third),
        story.failed(fourth, body=b"half", tokens=b"ids"),
    )
    assert figures(story)["with tokens"] == 2
    story.record(story.succeeded(story.claim_one()))  # the retry of the fourth has none
    assert figures(story)["with tokens"] == 2


def test_what_is_cancelled_and_retried_by_an_operator_is_counted_where_it_is(story: StoredRun):
    claimed = story.claim(4)
    story.record(story.succeeded(claimed[0]), story.failed(claimed[1], ErrorClass.CONTRACT))
    everything = RolloutFilter()
    transact(story.engine, lambda c: begin_cancel(c, story.run))
    transact(story.engine, lambda c: cancel_rollouts(c, story.run))
    assert figures(story) == counted(story)
    for state in (RolloutState.CANCELLED, RolloutState.FAILED):
        transact(story.engine, lambda c, s=state: retry_rollouts(c, story.run, everything, state=s))
    assert not story.states()["cancelled"]


def test_rows_changed_by_hand_are_counted_too(story: StoredRun):
    story.record(*(story.succeeded(attempt, 1 / 3) for attempt in story.claim()))
    with story.engine.begin() as connection:
        connection.execute(text("UPDATE rollouts SET reward = 0.2 WHERE rollout_index = 0"))
        connection.execute(text("DELETE FROM attempts WHERE attempt_no = 1 AND step = 7"))


def test_a_run_that_is_deleted_leaves_no_sums(engine: Engine):
    story = StoredRun(engine, prompts=2, n=2)
    story.record(*(story.succeeded(attempt, 0.1) for attempt in story.claim()))
    with engine.begin() as connection:
        for table in ("attempts", "rollouts", "groups"):
            connection.execute(
                text(f"DELETE FROM {table} WHERE run_id = :id"), {"id": story.run.run_id}
            )
    assert figures(story)["reward"] == (0, None, None)
    assert figures(story)["attempts"] == (0, 0, 0)


def test_errors_are_told_by_class_code_and_worker_with_the_newest_example(story: StoredRun):
    first, second = story.claim(2)
    story.record(story.failed(first, worker_id="w1"))
    again = story.claim_one()
    story.record(story.failed(again, ErrorClass.CONTRACT, worker_id="w2"))
    story.record(story.failed(second, ErrorClass.CONTRACT, worker_id="w2"))
    by_class = transact(story.engine, lambda c: errors_by_class(c, story.run))
    assert [(row["error_class"], row["attempts"], row["rollouts"]) for row in by_class] == [
        ("contract", 2, 2),
        ("model_transport", 1, 0),
    ]
    assert by_class[0]["example"]["label"].endswith("g000000-r1-a1")
    by_worker = transact(story.engine, lambda c: errors_by_worker(c, story.run))
    assert [(row["worker"], row["errors"]) for row in by_worker] == [("w2", 2), ("w1", 1)]


def test_the_reconciler_makes_few_rows_of_many_and_changes_no_sum(
    engine: Engine, redis_place: BrokerPlace, make_settings: Callable[..., Settings]
):
    story = StoredRun(engine, prompts=60, n=1, n_min=1)
    while claimed := story.claim(1):
        story.beat(*claimed)
        story.record(story.succeeded(claimed[0], claimed[0].group_no / 7))
    many, before = n_rows(story), figures(story)
    settings = make_settings(redis_place, lease={"poll_s": 0.01})
    reconciler = Reconciler(engine, broker_of(settings), open_payloads(settings), settings)
    reconciler.step()
    reconciler.close()
    assert n_rows(story) < 10 < many
    assert figures(story) == before == counted(story)
    assert transact(engine, fold_run_counters) == 0
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def test_writers_of_one_run_and_folding_do_not_wait_for_each_other(engine: Engine):
    story = StoredRun(engine, prompts=120, n=1, n_min=1)
    while n_rows(story) < 300:
        story.record(story.succeeded(story.claim_one()))

    def impatient(work: Callable[[Connection], Any]) -> Any:
        with engine.begin() as second:
            second.execute(text("SET LOCAL lock_timeout = '10s'"))
            return work(second)

    one, other = story.claim(2)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE rollouts SET state = 'running' WHERE rollout_id = :id"),
            {"id": one.rollout_id},
        )
        # Neither needs what the open transaction holds.
        impatient(
            lambda c: c.execute(
                text("UPDATE rollouts SET state = 'running' WHERE rollout_id = :id"),
                {"id": other.rollout_id},
            )
        )
        assert impatient(fold_run_counters)
    story.record(story.succeeded(one), story.succeeded(other))
    assert figures(story) == counted(story)


def test_an_upgrade_counts_what_an_older_store_holds(story: StoredRun):
    first, second = story.claim(2)
    story.record(story.succeeded(first, 0.4), story.failed(second, ErrorClass.CONTRACT))
    before = figures(story)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with story.engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0002")
        command.upgrade(config, "head")
    assert figures(story) == before
    with story.engine.begin() as connection:
        connection.execute(text("UPDATE trajectories SET tokens_uri = 'file:///ids'"))
        config.attributes["connection"] = connection
        command.downgrade(config, "0018")
        command.upgrade(config, "head")
    assert figures(story)["with tokens"] == 1
    assert [row["error_code"] for row in story.rollouts() if row["state"] == "failed"] == ["test"]
