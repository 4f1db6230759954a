"""The rows of other runs cost nothing: what is done often reads those of its own run only.

The plans are those that Postgres chooses for the pipeline's own statements in a store with many
finished runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fixtures.servers import PrivateServers
from fixtures.stored_run import StoredRun
from sqlalchemy import Connection, Engine, event, text

from benchmarks.store_subject import GROUP, PAST_RUN, fill_runs, tidy
from pipeline.contract.messages import Heartbeat
from pipeline.contract.rollout import RolloutState
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.batch_leases import lease_batch
from pipeline.store.capacity import first_not_admitted
from pipeline.store.engine import open_engine, transact
from pipeline.store.group_policy import end_overdue_groups
from pipeline.store.leases import keep_alive, queues_in_flight, silent_attempts
from pipeline.store.operations import (
    begin_cancel,
    cancel_rollouts,
    continue_run,
    pause_run,
    retry_rollouts,
)
from pipeline.store.outcomes import record_outcomes
from pipeline.store.policies import groups_begun_before, policies_in_use, publish_policy
from pipeline.store.rewind import give_back_later_steps
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.rollouts import claim, count_in_flight
from pipeline.store.runs import active_runs, get_run
from pipeline.store.status import run_state, run_status
from pipeline.store.train_batches import commit_batches
from pipeline.store.unfit_groups import count_ready_tokens, count_too_small
from pipeline.store.working_time import advance_clocks

RUNS, ROLLOUTS = 100, 160
#: Tables that grow with the rollouts of a run.
LARGE = ("prompts", "groups", "rollouts", "attempts", "trajectories", "rewards", "events")
_SCAN = re.compile(rf"Seq Scan on ({'|'.join(LARGE)})\b")


@pytest.fixture(scope="module")
def many_runs(servers: PrivateServers) -> Iterator[Engine]:
    """A store with many finished runs."""
    url = servers.create_database()
    engine = open_engine(url)
    fill_runs(engine, runs=RUNS, rollouts=ROLLOUTS)
    yield engine
    engine.dispose()
    servers.drop_database(url)


@pytest.fixture
def story(many_runs: Engine) -> Iterator[StoredRun]:
    """A run under way: some of its rollouts have ended, some are in flight, most are queued."""
    story = StoredRun(many_runs, prompts=40, n=4, group_deadline_s=3600)
    for attempts in (story.claim(16), story.claim(8)):
        story.record(*(story.succeeded(attempt) for attempt in attempts[:8]))
    tidy(many_runs)
    yield story
    transact(many_runs, lambda c: begin_cancel(c, story.run))
    while transact(many_runs, lambda c: cancel_rollouts(c, story.run)):
        pass


@contextmanager
def scans(engine: Engine) -> Iterator[list[str]]:
    """Collect the statements for which Postgres reads a large table from end to end."""
    found: list[str] = []

    def explain(
        connection: Connection, _: Any, statement: str, parameters: Any, *__: object
    ) -> None:
        if statement.split()[0] not in ("SELECT", "WITH", "UPDATE", "DELETE", "INSERT"):
            return
        cursor = connection.connection.cursor()
        cursor.execute("EXPLAIN " + statement, parameters)
        plan = "\n".join(row[0] for row in cursor.fetchall())
        if _SCAN.search(plan):
            found.append(f"{statement}\n{plan}")

    event.listen(engine, "before_cursor_execute", explain)
    yield found
    event.remove(engine, "before_cursor_execute", explain)


def rows_read(connection: Connection) -> Counter[str]:
    """Return the rows of each table that this connection has read, by scans and by indexes."""
    query = """
        SELECT relname, seq_tup_read + idx_tup_fetch AS n FROM pg_stat_xact_user_tables
        WHERE relname = ANY(:large)
    """
    rows = connection.execute(text(query), {"large": list(LARGE)})
    return Counter({row.relname: row.n for row in rows})


def renew(connection: Connection, story: StoredRun) -> None:
    keep_alive(connection, [Heartbeat(worker_id="w1", sequence=1)], lease_s=30)


def look_for_silence(connection: Connection, story: StoredRun) -> None:
    queues_in_flight(connection)
    now = connection.execute(text("SELECT now()")).scalar_one()
    silent_attempts(connection, watermark=now, departed={}, expire=True, grace_s=5, most=100)


def record(connection: Connection, story: StoredRun) -> None:
    record_outcomes(connection, [story.succeeded(a) for a in claimed(connection, story)])


def claimed(connection: Connection, story: StoredRun) -> list[Any]:
    return claim(connection, story.run, most=8, lease_s=60)


def pull(connection: Connection, story: StoredRun, groups: int | None, **fields: Any) -> None:
    lease_batch(
        connection,
        story.run,
        consumer="c",
        step=0,
        spec=BatchSpec(groups=groups, **fields),
        policy_version=None,
        lease_s=60,
    )


def pull_fresh(connection: Connection, story: StoredRun) -> None:
    """Pull where one group is too old, and the others have equal rewards."""
    publish_policy(connection, story.run, 9)
    lease_batch(
        connection,
        story.run,
        consumer="c",
        step=0,
        spec=BatchSpec(
            groups=1,
            max_staleness=9,
            filter_zero_variance=True,
            requeue=("stale", "zero_variance"),
            group_deadline_s=60,
        ),
        policy_version=9,
        lease_s=60,
    )


def rewind(connection: Connection, story: StoredRun) -> None:
    pull_and_commit(connection, story)
    give_back_later_steps(connection, story.run, consumer="c", after=-1, afresh=True)


def pull_and_commit(connection: Connection, story: StoredRun) -> None:
    pull(connection, story, 1)
    commit_batches(connection, story.run, consumer="c", upto_step=0)


def cancel(connection: Connection, story: StoredRun) -> None:
    begin_cancel(connection, story.run)
    assert cancel_rollouts(connection, story.run, most=20)


def cancel_older_groups(connection: Connection, story: StoredRun) -> None:
    publish_policy(connection, story.run, 1)
    begun = groups_begun_before(connection, story.run, 1)
    assert cancel_rollouts(connection, story.run, groups=begun, most=20)


def pause(connection: Connection, story: StoredRun) -> None:
    pause_run(connection, story.run)
    continue_run(connection, story.run)


OFTEN: dict[str, Callable[[Connection, StoredRun], object]] = {
    "a look at active runs": lambda c, _: active_runs(c),
    "a look at rollouts in flight": lambda c, _: count_in_flight(c),
    "a claim": claimed,
    "outcomes": record,
    "a heartbeat": renew,
    "a look for silence": look_for_silence,
    "a look at deadlines": lambda c, _: end_overdue_groups(c, most=100),
    "an advance of clocks": lambda c, _: advance_clocks(c),
    "a pull": pull_and_commit,
    "a pull of tokens": lambda c, story: pull(c, story, None, tokens=10),
    "a pull of fresh groups": pull_fresh,
    "a rewind": rewind,
    "a look at capacity": lambda c, story: first_not_admitted(c, story.run),
    "a look at policies": lambda c, _: policies_in_use(c),
    "a pull of too few groups": lambda c, story: pull(c, story, 100),
    "a look at ready tokens": lambda c, s: count_ready_tokens(c, s.run, BatchSpec(tokens=1)),
    "a look at small groups": lambda c, s: count_too_small(c, s.run, BatchSpec(groups=1)),
    "a state": lambda c, story: run_state(c, story.run),
    "a status": lambda c, story: run_status(c, story.run),
    "a cancel": cancel,
    "a cancel of older groups": cancel_older_groups,
    "a pause": pause,
}


@pytest.mark.parametrize("work", OFTEN.values(), ids=OFTEN)
def test_the_rows_of_other_runs_are_not_read(
    many_runs: Engine, story: StoredRun, work: Callable[[Connection, StoredRun], object]
):
    with many_runs.connect() as connection:
        with scans(many_runs) as found:
            work(connection, story)
        assert found == []
        connection.rollback()
        before = rows_read(connection)
        work(connection, story)
        read = rows_read(connection) - before
        connection.rollback()
    # The story has 160 rollouts, the other runs 16,000.
    too_many = {table: read[table] for table in LARGE if read[table] > 10 * 160}
    assert too_many == {}


def test_a_pull_from_a_finished_run_does_not_read_its_closed_groups(many_runs: Engine):
    with many_runs.connect() as connection:
        past = get_run(connection, f"{PAST_RUN}-0")
        before = rows_read(connection)
        values = {"consumer": "c", "step": 0, "policy_version": None, "lease_s": 60}
        assert lease_batch(connection, past, spec=BatchSpec(groups=1), **values) is None
        read = rows_read(connection) - before
        connection.rollback()
    assert read["groups"] < ROLLOUTS // GROUP // 2


def test_a_retry_of_cancelled_rollouts_reads_those_of_its_run(many_runs: Engine, story: StoredRun):
    with many_runs.connect() as connection:
        cancel(connection, story)
        with scans(many_runs) as found:
            retry_rollouts(connection, story.run, RolloutFilter(), state=RolloutState.CANCELLED)
        connection.rollback()
    assert found == []
