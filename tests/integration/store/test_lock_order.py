"""Writers that run at once wait for each other, and never in a circle: Postgres counts no deadlock.

The order of locks is in the docstring of `pipeline.store`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.stored_run import SOURCE, StoredRun, payload
from fixtures.waiting import wait_until
from sqlalchemy import Engine, create_engine, event, text

from pipeline.collector import Collector
from pipeline.contract.errors import ErrorClass, NotAllowed, NotFound
from pipeline.contract.messages import AttemptBeat, Completion, ErrorRecord, Heartbeat, RewardPart
from pipeline.contract.rollout import RolloutState
from pipeline.contract.train_batch import BatchSpec
from pipeline.dispatcher import Dispatcher
from pipeline.queue.completions import Delivery
from pipeline.redrive import redrive
from pipeline.settings import Settings
from pipeline.store.batch_leases import lease_batch
from pipeline.store.dropped_groups import drop_unreadable
from pipeline.store.engine import open_engine, transact
from pipeline.store.group_policy import end_overdue_groups
from pipeline.store.operations import (
    begin_cancel,
    cancel_rollouts,
    continue_run,
    pause_run,
    retry_rollouts,
)
from pipeline.store.outcomes import record_outcomes
from pipeline.store.policies import publish_policy
from pipeline.store.prompts import add_prompts
from pipeline.store.removal import begin_removal, remove_groups, remove_rest
from pipeline.store.rewind import give_back_later_steps
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.run_counters import fold_run_counters
from pipeline.store.train_batches import abandon_batch, commit_batches
from pipeline.store.working_time import advance_clocks

ROUNDS = 30
#: A removal takes as long as many rounds of the others.
REMOVALS = 6
_NAME = "test_lock_order"


class Writers:
    """Several runs, and each kind of writer with its random choices."""

    def __init__(self, engine: Engine, settings: Settings, seed: int) -> None:
        self.engine = engine
        self.settings = settings
        self.random = random.Random(seed)
        lively: dict[str, Any] = {"n": 2, "oversample": 1, "replacements": 2, "max_attempts": 2}
        clocked: dict[str, Any] = {"group_deadline_s": 0.2, "max_error_rate": 1.0}
        self.stories = [
            StoredRun(engine, prompts=12, **lively, **clocked),
            StoredRun(engine, prompts=12, **lively),
            StoredRun(engine, prompts=12, n=2, max_error_rate=1.0),
        ]
        dispatcher = Dispatcher(engine, None, settings)  # pyright: ignore[reportArgumentType]
        self._claim: Callable[..., Any] = dispatcher._claim
        self.consumers = iter(range(1000))
        self.rows = iter(range(1000, 100_000))

    def attempts(self, states: str = "'dispatched', 'running'") -> list[Any]:
        query = f"""
            SELECT a.run_id, r.group_id, a.rollout_id, a.attempt_no, a.state, slug, r.group_no,
                   r.rollout_index
            FROM attempts a JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = a.run_id
            WHERE a.state IN ({states}) ORDER BY random() LIMIT 40
        """
        with self.engine.connect() as connection:
            return list(connection.execute(text(query)))

    def completion(self, row: Any, **fields: Any) -> Completion:
        label = f"{row.slug}-g{row.group_no:06d}-r{row.rollout_index}-a{row.attempt_no}"
        return Completion(
            run_id=row.run_id,
            group_id=row.group_id,
            rollout_id=row.rollout_id,
            attempt_no=row.attempt_no,
            label=label,
            worker_id="w0",
            **fields,
        )

    def outcome(self, row: Any) -> Completion:
        part = RewardPart(name="numeric", value=1.0)
        if self.random.random() < 0.5:
            return self.completion(row, outcome="succeeded", reward=1.0, reward_parts=(part,))
        error_class = self.random.choice([ErrorClass.WORKER_LOST, ErrorClass.REWARD_ERROR])
        error = ErrorRecord(error_class=error_class, code="test", message="", phase="scoring")
        return self.completion(row, outcome="failed", error=error)

    def take_in(self, delivery: Delivery) -> None:
        unused: Any = None
        collector = Collector(
            self.engine, unused, self.settings, markers=unused, stop_attempts=lambda _: None
        )
        collector._take_in(delivery)

    # The writers

    def dispatch(self) -> None:
        transact(self.engine, self._claim)

    def collect(self) -> None:
        rows = self.attempts()
        some = self.random.sample(rows, len(rows) // 2)
        said = [self.outcome(row) for row in some]
        said += [self.outcome(row) for row in some[:2]]
        self.take_in(Delivery(completions=said, heartbeats=self.heartbeats()))

    def renew(self) -> None:
        self.take_in(Delivery(heartbeats=self.heartbeats()))

    def heartbeats(self) -> list[Heartbeat]:
        rows = self.attempts()
        workers = [f"w{number}" for number in range(6)]
        self.random.shuffle(workers)
        return [
            Heartbeat(
                worker_id=worker,
                sequence=1,
                attempts=tuple(
                    AttemptBeat(
                        rollout_id=row.rollout_id, attempt_no=row.attempt_no, phase="generating"
                    )
                    for row in self.random.sample(rows, len(rows) // 3)
                ),
            )
            for worker in workers
        ]

    def reconcile(self) -> None:
        transact(self.engine, advance_clocks)
        transact(self.engine, lambda c: end_overdue_groups(c, most=20))
        lost = [self.outcome(row) for row in self.attempts()[:10]]
        transact(self.engine, lambda c: record_outcomes(c, lost))
        transact(self.engine, fold_run_counters)

    def operate(self) -> None:
        story = self.random.choice(self.stories)
        try:
            if self.random.random() < 0.5:
                transact(self.engine, lambda c: pause_run(c, story.run))
                transact(self.engine, lambda c: continue_run(c, story.run))
            else:
                transact(self.engine, lambda c: begin_cancel(c, story.run))
                while transact(self.engine, lambda c: cancel_rollouts(c, story.run, most=15)):
                    pass
        except NotAllowed:
            pass
        for state in (RolloutState.FAILED, RolloutState.CANCELLED):
            transact(
                self.engine,
                lambda c, state=state: retry_rollouts(c, story.run, RolloutFilter(), state=state),
            )

    def enqueue(self) -> None:
        rows = [(row_no, payload(row_no)) for row_no in (next(self.rows), next(self.rows))]
        for story in self.stories[:2]:
            try:
                transact(self.engine, lambda c, s=story: add_prompts(c, s.run, SOURCE, rows))
            except NotAllowed:
                pass

    def train(self) -> None:
        run = self.random.choice(self.stories).run
        consumer = f"c{next(self.consumers)}"
        spec = BatchSpec(
            groups=2,
            max_staleness=0,
            filter_zero_variance=self.random.random() < 0.2,
            requeue=("stale", "zero_variance"),
            group_deadline_s=60,
        )
        version = self.random.choice([None, 0, 1])
        leased = transact(
            self.engine,
            lambda c: lease_batch(
                c, run, consumer=consumer, step=0, spec=spec, policy_version=version, lease_s=0.0
            ),
        )
        if leased is None:
            return
        choice = self.random.random()
        try:
            if choice < 0.2:
                afresh = choice < 0.1
                transact(
                    self.engine,
                    lambda c: give_back_later_steps(
                        c, run, consumer=consumer, after=-1, afresh=afresh
                    ),
                )
            elif choice < 0.6:
                transact(
                    self.engine, lambda c: commit_batches(c, run, consumer=consumer, upto_step=0)
                )
            else:
                transact(
                    self.engine,
                    lambda c: abandon_batch(c, run, consumer=consumer, step=0, reason="test"),
                )
        except NotAllowed:
            pass

    def publish(self) -> None:
        run = self.random.choice(self.stories).run
        try:
            transact(self.engine, lambda c: publish_policy(c, run, next(self.consumers)))
        except NotAllowed:
            pass

    def drop(self) -> None:
        run = self.random.choice(self.stories).run
        consumer = f"c{next(self.consumers)}"
        leased = transact(
            self.engine,
            lambda c: lease_batch(
                c,
                run,
                consumer=consumer,
                step=0,
                spec=BatchSpec(groups=3),
                policy_version=None,
                lease_s=0.0,
            ),
        )
        if leased is not None:
            query = text("SELECT group_id FROM train_batch_groups WHERE batch_id = :batch_id")
            with self.engine.connect() as connection:
                ids = list(connection.scalars(query, {"batch_id": leased.batch_id}))
            reasons = dict.fromkeys(self.random.sample(ids, len(ids)), "test")
            transact(
                self.engine,
                lambda c: drop_unreadable(c, leased.batch_id, leased.manifest or "", reasons),
            )
        letters = text("SELECT dead_letter_id FROM dead_letters ORDER BY random() LIMIT 3")
        with self.engine.connect() as connection:
            numbers = list(connection.scalars(letters))
        for number in numbers:
            try:
                transact(self.engine, lambda c, n=number: redrive(c, n))
            except (NotAllowed, NotFound):
                pass

    def remove(self) -> None:
        """Fill a run, end it with its dead letters and batches, and remove it."""
        story = StoredRun(self.engine, prompts=6, n=1, n_min=1)
        self.stories.append(story)
        claimed = story.claim()
        story.record(*[story.succeeded(each) for each in claimed[:4]])
        self.drop()
        transact(self.engine, lambda c: begin_cancel(c, story.run))
        while transact(self.engine, lambda c: cancel_rollouts(c, story.run, most=15)):
            pass
        self.stories.remove(story)
        transact(self.engine, lambda c: begin_removal(c, story.run))
        while transact(self.engine, lambda c: remove_groups(c, story.run, most=3))["groups"]:
            pass
        transact(self.engine, lambda c: remove_rest(c, story.run))

    def rescore(self) -> None:
        part = RewardPart(name="numeric", value=1.0)
        said = [
            self.completion(
                row, purpose="rescore", outcome="succeeded", reward=1.0, reward_parts=(part,)
            )
            for row in self.attempts("'failed'")
        ]
        self.take_in(Delivery(completions=said))


@pytest.fixture
def eager_engine(engine: Engine) -> Iterator[Engine]:
    """An engine whose servers look for deadlocks at once, with a connection for each writer."""
    its_engine = open_engine(engine.url.render_as_string(hide_password=False), pool_size=20)

    @event.listens_for(its_engine, "connect")
    def look_at_once(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET deadlock_timeout = '10ms'")
            cursor.execute(f"SET application_name = '{_NAME}'")
        connection.commit()

    @event.listens_for(its_engine, "handle_error")
    def report(context: Any) -> None:
        if getattr(context.original_exception, "sqlstate", "") == "40P01":
            diagnosis = context.original_exception.diag
            print(diagnosis.message_detail, diagnosis.context, context.statement, sep="\n")

    yield its_engine
    its_engine.dispose()


def deadlocks(engine: Engine) -> int:
    """Return what Postgres counted, after the connections of this engine have ended."""
    engine.dispose()
    own = create_engine(engine.url)
    others = f"""
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = '{_NAME}'
    """
    counted = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    with own.connect() as connection:

        def ended() -> bool:
            connection.rollback()
            return connection.execute(text(others)).scalar_one() == 0

        wait_until(ended, what="the writers' connections to end")
        count = connection.execute(text(counted)).scalar_one()
    own.dispose()
    return count


TOGETHER = {
    "two collectors with heartbeats": ["renew", "renew", "dispatch"],
    "two collectors with outcomes": ["collect", "collect", "dispatch"],
    "a collector and an operator": ["collect", "operate", "dispatch"],
    "a collector and a reconciler": ["collect", "reconcile", "dispatch", "operate"],
    "trainers and unreadable groups": ["train", "drop", "drop", "rescore", "collect", "dispatch"],
    "removals": ["remove", "remove", "drop", "collect", "train", "reconcile"],
    "trainers and a rescore": ["train", "train", "rescore", "publish", "collect", "dispatch"],
    "all": [
        *("dispatch", "collect", "collect", "renew", "reconcile", "operate"),
        *("enqueue", "train", "rescore", "drop"),
    ],
}


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_writers_that_run_at_once_never_deadlock(engine, eager_engine, make_settings, names):
    writers = Writers(eager_engine, make_settings(), seed=7)
    writers.dispatch()
    before = deadlocks(eager_engine)
    errors: list[BaseException] = []

    def work(write: Callable[[], None]) -> None:
        try:
            for _ in range(REMOVALS if write == writers.remove else ROUNDS):
                write()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(getattr(writers, name),)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert deadlocks(eager_engine) == before
