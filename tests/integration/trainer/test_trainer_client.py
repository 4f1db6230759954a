"""What a trainer can rely on when it, another one, or both come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from sqlalchemy import Engine, text

from pipeline.contract.errors import NotAllowed, NotFound
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.store.accounting import check_accounting
from pipeline.store.batch_leases import lease_batch
from pipeline.store.engine import transact
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch

TWO = BatchSpec(groups=2)
#: A lease that is over as soon as it is granted.
AT_ONCE = 0.0

Connect = Callable[..., TrainerClient]


@pytest.fixture
def story(engine: Engine) -> Iterator[StoredRun]:
    """Six complete groups; the books balance in the end."""
    story = StoredRun(engine, prompts=6, n=2)
    story.record(*[story.succeeded(a, reward=float(a.rollout_index)) for a in story.claim()])
    yield story
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


@pytest.fixture
def connect(story: StoredRun) -> Connect:
    def connect(consumer: str = "a", *, lease_s: float = 3600.0) -> TrainerClient:
        return TrainerClient(story.engine, run=story.run.slug, consumer=consumer, lease_s=lease_s)

    return connect


def numbers(batch: TrainBatch) -> list[int]:
    return [group.group_no for group in batch.groups]


def states(story: StoredRun) -> str:
    return " ".join(group["state"] for group in story.groups())


def test_a_step_gives_the_same_batch_to_whoever_comes_back(connect):
    first = connect().pull(3, TWO)
    again = connect().pull(3, BatchSpec(groups=5))
    assert (numbers(first), first.replayed) == ([0, 1], False)
    assert again.groups == first.groups
    assert again.replayed


def test_processes_that_pull_a_runs_last_groups_at_once_get_the_same_batch(connect, story):
    """The second finds the groups locked, and the first commits before the figures are read."""
    six, first = BatchSpec(groups=6), connect()

    class Second(TrainerClient):
        def stats(self, spec=None):
            lease.commit()
            return super().stats(spec)

    with story.engine.connect() as lease:
        keys = {"consumer": "a", "step": 0, "spec": six, "policy_version": None, "lease_s": 60.0}
        assert lease_batch(lease, story.run, **keys) is not None
        second = Second(story.engine, run=story.run.slug, consumer="a")
        assert numbers(second.pull(0, six)) == [0, 1, 2, 3, 4, 5]
    assert numbers(first.pull(0, six)) == [0, 1, 2, 3, 4, 5]
    second.close()


def test_no_group_is_in_two_batches(connect):
    batches = [connect(consumer).pull(step, TWO) for consumer, step in [("a", 0), ("b", 0)]]
    batches.append(connect("a").pull(1, TWO))
    assert sorted(number for batch in batches for number in numbers(batch)) == [0, 1, 2, 3, 4, 5]


def test_a_commit_takes_all_steps_up_to_it_and_again_nothing(connect, story):
    trainer = connect()
    for step in range(3):
        trainer.pull(step, TWO)
    assert trainer.commit(1, checkpoint_uri="file:///c1") == 4
    assert trainer.commit(1) == trainer.commit(0) == 0
    assert states(story) == "consumed consumed consumed consumed leased leased"
    assert numbers(trainer.pull(0, TWO)) == [0, 1]
    assert states(story).count("consumed") == 4


def test_what_is_abandoned_is_for_whoever_pulls_next(connect, story):
    trainer = connect()
    trainer.pull(0, TWO)
    assert trainer.abandon(0, reason="out of memory") == 2
    assert trainer.abandon(0, reason="again") == 0
    assert states(story) == "ready " * 5 + "ready"
    assert numbers(connect("b").pull(0, TWO)) == [0, 1]
    assert numbers(trainer.pull(0, TWO)) == [2, 3]


def test_a_committed_step_cannot_be_abandoned(connect, story):
    trainer = connect()
    trainer.pull(0, TWO)
    trainer.commit(0)
    assert trainer.abandon(0, reason="too late") == 0
    assert states(story).startswith("consumed consumed")


def test_a_lease_that_ran_out_stays_its_consumers_until_another_one_is_short(connect):
    idle = connect("a", lease_s=AT_ONCE)
    assert numbers(idle.pull(0, TWO)) == [0, 1]
    assert numbers(connect("b").pull(0, BatchSpec(groups=4))) == [2, 3, 4, 5]
    assert idle.pull(0, TWO).replayed
    assert idle.commit(0) == 2


def test_groups_that_another_consumer_took_over_are_trained_once(connect, story):
    idle, other = connect("a", lease_s=AT_ONCE), connect("b")
    idle.pull(0, TWO)
    assert numbers(other.pull(0, BatchSpec(groups=6))) == [0, 1, 2, 3, 4, 5]
    for lost in (lambda: idle.pull(0, TWO), lambda: idle.commit(0)):
        with pytest.raises(NotAllowed) as refused:
            lost()
        assert refused.value.code == "E133"
    assert other.commit(0) == 6


def test_a_commit_during_a_take_over_waits_for_it_and_is_refused(connect, story):
    idle = connect("a", lease_s=AT_ONCE)
    idle.pull(0, TWO)
    with ThreadPoolExecutor(1) as pool, story.engine.connect() as taking:
        lease_batch(
            taking,
            story.run,
            consumer="b",
            step=0,
            spec=BatchSpec(groups=6),
            policy_version=None,
            lease_s=60,
        )
        commit = pool.submit(idle.commit, 0)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid IN (SELECT pid FROM"
        waiting += " pg_stat_activity WHERE datname = current_database())"
        wait_until(lambda: story.rows(waiting) == [{"count": 1}])
        assert not commit.done()
        taking.commit()
        with pytest.raises(NotAllowed, match="cannot be committed"):
            commit.result(30)
    assert connect("b").commit(0) == 6


def test_a_commit_that_does_not_consume_what_was_leased_is_undone(connect, story):
    trainer = connect()
    trainer.pull(0, TWO)
    change = "UPDATE groups SET state = :state WHERE group_no = 1"
    transact(story.engine, lambda c: c.execute(text(change), {"state": "ready"}))
    with pytest.raises(NotAllowed, match="1 of its 2 groups") as refused:
        trainer.commit(0)
    assert refused.value.code == "E133"
    assert states(story).startswith("leased ready")
    transact(story.engine, lambda c: c.execute(text(change), {"state": "leased"}))
    assert trainer.commit(0) == 2


def test_who_lost_a_step_goes_on_with_other_groups_after_resuming(connect, story):
    idle, other = connect("a", lease_s=AT_ONCE), connect("b")
    idle.pull(0, TWO)
    idle.commit(0)
    idle.pull(1, TWO)
    assert numbers(other.pull(0, BatchSpec(groups=4))) == [2, 3, 4, 5]
    other.abandon(0, reason="enough")
    with pytest.raises(NotAllowed):
        idle.pull(1, TWO)
    resumed = idle.resume(committed_step=0)
    assert (resumed.next_step, resumed.replay) == (1, ())
    assert numbers(idle.pull(1, TWO)) == [2, 3]
    assert idle.commit(1) == 2


def test_resuming_commits_what_the_checkpoint_has_and_names_what_it_lacks(connect, story):
    trainer = connect()
    for step in range(3):
        trainer.pull(step, TWO)
    resumed = connect().resume(committed_step=1)
    assert (resumed.committed_step, resumed.next_step, resumed.replay) == (1, 2, (2,))
    assert states(story).count("consumed") == 4
    from_the_start = connect().resume(committed_step=None)
    assert (from_the_start.next_step, from_the_start.replay) == (0, (0, 1, 2))


def test_a_stream_goes_on_after_the_last_commit_or_where_it_is_told(connect):
    for batch in connect().stream(TWO):
        if batch.step == 2:
            break
        connect().commit(batch.step)
    later = [(batch.step, numbers(batch)) for batch in connect().stream(TWO)]
    assert later == [(2, [4, 5])]
    replayed = [(batch.step, batch.replayed) for batch in connect().stream(TWO, start_step=0)]
    assert replayed == [(0, True), (1, True), (2, True)]


def test_a_trainer_never_gets_a_run_of_another_name(engine):
    StoredRun(engine, slug="exp10")
    with pytest.raises(NotFound, match="no run 'exp1'"):
        TrainerClient(engine, run="exp1")


def test_a_run_is_drained_only_when_no_other_consumer_can_give_groups_back(connect):
    first, second = connect("a"), connect("b")
    first.pull(0, BatchSpec(groups=4))
    second.pull(0, TWO)
    with pytest.raises(NotReady, match="2 groups are leased to other consumers") as waiting:
        first.pull(1, TWO, timeout_s=0.1)
    assert not waiting.value.drained
    second.abandon(0, reason="out of memory")
    assert numbers(first.pull(1, TWO)) == [4, 5]
    # A consumer need not wait for what it holds itself.
    with pytest.raises(NotReady) as over:
        first.pull(2, TWO, timeout_s=30)
    assert over.value.drained
    assert not second.stats().drained


def test_too_few_groups_are_an_error_that_says_why(connect, engine):
    story = StoredRun(engine, prompts=2, n=2)
    trainer = TrainerClient(engine, run=story.run.slug)
    story.record(*[story.succeeded(a) for a in story.claim(2)])
    with pytest.raises(NotReady, match="has 1 of 2 groups ready") as error:
        trainer.pull(0, TWO, timeout_s=0.1)
    assert not error.value.drained
    assert error.value.stats.groups["open"] == 1
    story.record(*[story.succeeded(a) for a in story.claim()])
    assert numbers(trainer.pull(0, TWO, timeout_s=0.1)) == [0, 1]
