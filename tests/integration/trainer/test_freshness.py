"""No batch holds a group older than allowed, and none is lost: it is dropped, counted, or begun
afresh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.requests import request_of
from pipeline.store.accounting import check_accounting
from pipeline.store.capacity import first_not_admitted, run_capacity
from pipeline.store.engine import transact
from pipeline.store.policies import list_policies
from pipeline.store.runs import Run, get_run
from pipeline.store.status import run_status
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch


@pytest.fixture
def stories(engine: Engine) -> Iterator[list[StoredRun]]:
    """The runs of a test; their books balance in the end."""
    told: list[StoredRun] = []
    yield told
    for story in told:
        with engine.connect() as connection:
            assert check_accounting(connection, story.run.run_id) == []


@pytest.fixture
def begin(engine, stories):
    def begin(prompts: int = 6, n: int = 2, **config) -> StoredRun:
        stories.append(StoredRun(engine, prompts=prompts, n=n, **config))
        return stories[-1]

    return begin


def trainer_of(story: StoredRun, consumer: str = "a") -> TrainerClient:
    return TrainerClient(story.engine, run=story.run.slug, consumer=consumer)


def now(story: StoredRun) -> Run:
    return transact(story.engine, lambda c: get_run(c, story.run.slug))


def complete(story: StoredRun, version: int, *, groups: int, rewards: tuple[float, ...] = (0, 1)):
    """Let the next groups end with this version, the rollouts of each with these rewards."""
    story.record(
        *(
            story.succeeded(
                each, rewards[each.rollout_index], version_min=version, version_max=version
            )
            for each in story.claim(groups * story.config.n)
        )
    )


def numbers(batch: TrainBatch) -> list[int]:
    return [group.group_no for group in batch.groups]


def drops(story: StoredRun) -> dict[str, int]:
    return transact(story.engine, lambda c: run_status(c, story.run)).drops


# --- published versions


def test_a_published_version_is_in_the_next_requests_and_the_same_again_changes_nothing(begin):
    story = begin()
    trainer = trainer_of(story)
    assert trainer.publish_policy(3, endpoints="http://10.0.0.1/v1", uri="file:///w3")
    assert not trainer.publish_policy(3, endpoints=["http://10.0.0.1/v1"], uri="file:///w3")
    assert not trainer.publish_policy(3)
    request = request_of(now(story), story.claim_one())
    assert (request.policy_version, request.base_url) == (3, "http://10.0.0.1/v1")
    assert request.policy is not None
    assert (request.policy.serial, request.policy.mode) == (1, "keep")
    assert trainer.publish_policy(4, mode="abort")
    (newest, oldest) = transact(story.engine, lambda c: list_policies(c, story.run.run_id, most=10))
    # Weights that are updated in place stay where they are.
    assert (newest.version, newest.endpoints, newest.uri) == (4, ("http://10.0.0.1/v1",), None)
    assert (oldest.version, oldest.uri) == (3, "file:///w3")


def test_versions_never_go_backwards(begin):
    trainer = trainer_of(begin())
    trainer.publish_policy(5)
    with pytest.raises(NotAllowed, match="from 6 on") as refused:
        trainer.publish_policy(4)
    assert refused.value.code == "E136"


def test_a_pause_ends_with_the_same_version_in_another_mode_or_with_the_next_one(begin):
    story = begin()
    trainer = trainer_of(story)
    trainer.publish_policy(1, mode="pause")
    assert trainer.publish_policy(1, mode="keep")
    trainer.publish_policy(1, mode="pause")
    (told,) = (
        sentence
        for sentence in transact(story.engine, lambda c: run_status(c, story.run)).waits
        if "paused" in sentence
    )
    assert "at version 1" in told
    assert trainer.publish_policy(2)
    policy = now(story).policy
    assert policy is not None
    assert (policy.version, policy.mode) == (2, "keep")


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (-1, {}),
        (2**31, {}),
        (1, {"mode": "stop"}),
        (1, {"endpoints": ["10.0.0.1"]}),
        (1, {"endpoints": ["http://user:pw@10.0.0.1/v1"]}),
    ],
)
def test_a_publication_that_cannot_be_is_refused_and_changes_nothing(begin, version, options):
    story = begin()
    with pytest.raises(InputError) as refused:
        trainer_of(story).publish_policy(version, **options)
    assert refused.value.code == "E123"
    assert "pw" not in str(refused.value)
    assert now(story).policy is None


# --- staleness


def test_groups_older_than_the_bound_are_dropped_and_counted_the_stalest_go_first(begin):
    story = begin(prompts=4)
    trainer = trainer_of(story)
    trainer.publish_policy(1)
    for version in (5, 1, 4, 3):
        complete(story, version, groups=1)
    batch = trainer.pull(0, BatchSpec(groups=2, max_staleness=3), policy_version=6)
    assert numbers(batch) == [3, 2]
    assert drops(story) == {"stale": 1}
    assert numbers(trainer.pull(1, BatchSpec(groups=1, max_staleness=3), policy_version=6)) == [0]


def test_a_group_is_as_old_as_its_oldest_rollout(begin):
    story = begin(prompts=1)
    trainer = trainer_of(story)
    trainer.publish_policy(1)
    first, second = story.claim()
    story.record(story.succeeded(first, version_min=9, version_max=9))
    story.record(story.succeeded(second, version_min=2, version_max=9))
    with pytest.raises(NotReady, match="1 dropped \\(1 stale\\)") as drained:
        trainer.pull(0, BatchSpec(groups=1, max_staleness=6), policy_version=9)
    assert drained.value.drained


def test_staleness_needs_a_version_of_the_caller_and_of_the_rollouts(begin):
    story = begin(prompts=3)
    trainer = trainer_of(story)
    complete(story, 0, groups=3)
    one = BatchSpec(groups=1, max_staleness=0)
    # No version was published and no server reports one: 0 says nothing.
    assert numbers(trainer.pull(0, one, policy_version=100)) == [0]
    trainer.publish_policy(100)
    assert numbers(trainer.pull(1, one)) == [1]
    assert numbers(
        trainer.pull(2, BatchSpec(groups=1, max_staleness=None), policy_version=100)
    ) == [2]
    assert drops(story) == {}


def test_a_batch_that_was_leased_never_gets_too_old(begin):
    story = begin(prompts=2)
    trainer = trainer_of(story)
    trainer.publish_policy(1)
    complete(story, 1, groups=2)
    one = BatchSpec(groups=1, max_staleness=0)
    assert numbers(trainer.pull(0, one, policy_version=1)) == [0]
    again = trainer.pull(0, one, policy_version=50)
    assert (numbers(again), again.replayed) == ([0], True)
    assert drops(story) == {}


def test_the_runs_own_bound_is_kept_by_every_pull(begin):
    story = begin(prompts=2, max_staleness=1)
    trainer = trainer_of(story)
    trainer.publish_policy(1)
    complete(story, 1, groups=1)
    complete(story, 4, groups=1)
    assert numbers(trainer.pull(0, BatchSpec(groups=1), policy_version=4)) == [1]
    assert drops(story) == {"stale": 1}


def test_fifo_takes_groups_as_they_became_ready(begin):
    story = begin(prompts=3)
    claimed = story.claim()
    for number, version in ((2, 7), (0, 9), (1, 3)):
        story.record(
            *(
                story.succeeded(each, version_min=version, version_max=version)
                for each in claimed
                if each.group_no == number
            )
        )
    assert numbers(trainer_of(story).pull(0, BatchSpec(groups=3, order="fifo"))) == [2, 0, 1]
    trainer_of(story).abandon(0, reason="once more")
    assert numbers(trainer_of(story).pull(0, BatchSpec(groups=3))) == [1, 2, 0]


# --- equal rewards


def test_groups_of_equal_rewards_are_dropped_and_counted_by_value(begin):
    story = begin(prompts=6, n=3)
    for rewards in ((0, 0, 0), (1, 1, 1), (0.1, 0.1, 0.1), (0, 1, 0), (1, 1, 1)):
        complete(story, 0, groups=1, rewards=rewards)
    trainer = trainer_of(story)
    spec = BatchSpec(groups=1, filter_zero_variance=True)
    assert numbers(trainer.pull(0, spec)) == [3]
    assert drops(story) == {"zero_variance": 4}
    assert trainer.stats().equal_rewards == {"0": 1, "0.1": 1, "1": 2}
    assert "4 zero_variance [all 0: 1, all 0.1: 1, all 1: 2]" in (trainer.stats().why or "")


def test_a_single_rollout_has_no_variance_to_lack(begin):
    story = begin(prompts=1, n=1)
    complete(story, 0, groups=1)
    assert numbers(trainer_of(story).pull(0, BatchSpec(groups=1, filter_zero_variance=True))) == [0]


# --- prompts that are enqueued afresh


def test_the_prompt_of_a_dropped_group_can_be_enqueued_afresh(begin):
    story = begin(prompts=2, replacements=1, max_attempts=1)
    trainer = trainer_of(story)
    trainer.publish_policy(1)
    complete(story, 1, groups=2)
    spec = BatchSpec(groups=2, max_staleness=1, requeue=("stale",))
    with pytest.raises(NotReady) as waiting:
        trainer.pull(0, spec, policy_version=3)
    assert not waiting.value.drained
    old, new = story.groups()[:2], story.groups()[2:]
    assert [group["state"] for group in (*old, *new)] == ["dropped", "dropped", "open", "open"]
    assert [group["prompt_id"] for group in old] == [group["prompt_id"] for group in new]
    # A failed rollout of the new group is replaced like every other.
    first, *rest = story.claim()
    story.record(story.failed(first), *(story.succeeded(a, version_min=3) for a in rest))
    story.record(*(story.succeeded(each, version_min=3) for each in story.claim()))
    assert numbers(trainer.pull(0, spec, policy_version=3)) == [2, 3]
    trainer.commit(0)
    # Enqueueing the dataset again adds nothing.
    assert story.add(range(2)) == 0


def test_a_cancelled_run_gets_no_new_groups(begin, engine):
    from pipeline.store.operations import begin_cancel

    story = begin(prompts=1)
    trainer = trainer_of(story)
    trainer.publish_policy(1)
    complete(story, 1, groups=1)
    transact(engine, lambda c: begin_cancel(c, story.run))
    with pytest.raises(NotReady):
        trainer.pull(0, BatchSpec(groups=1, max_staleness=0, requeue=("stale",)), policy_version=9)
    assert [group["state"] for group in story.groups()] == ["dropped"]


# --- deadlines of a waiting trainer


def test_a_waiting_trainer_may_close_groups_that_take_too_long(begin):
    story = begin(prompts=2)
    first, *_ = story.claim(2)
    story.record(story.succeeded(first))
    spec = BatchSpec(groups=1, group_deadline_s=30)
    with pytest.raises(NotReady):
        trainer_of(story).pull(0, spec)
    begun, waiting = story.groups()
    (dispatched,) = story.rows(
        "SELECT min(dispatched_at) AS at FROM attempts WHERE run_id = :run_id"
    )
    assert (begun["deadline_at"] - dispatched["at"]).total_seconds() == 30
    assert waiting["deadline_at"] is None
    # An earlier deadline stays.
    with pytest.raises(NotReady):
        trainer_of(story).pull(0, BatchSpec(groups=1, group_deadline_s=60))
    assert story.groups()[0]["deadline_at"] == begun["deadline_at"]


# --- capacity and admission


def test_capacity_counts_what_is_ahead_of_the_trainer(begin):
    story = begin(prompts=30, max_staleness=1, groups_per_step=3)
    trainer = trainer_of(story)
    assert trainer.capacity() == 6
    complete(story, 0, groups=3)
    story.claim(3)  # two groups, one of them in part
    assert trainer.capacity() == 1
    trainer.pull(0, BatchSpec(groups=3), policy_version=0)
    assert trainer.capacity() == 1
    trainer.publish_policy(1)
    # Its batch is trained, though not committed.
    assert trainer.capacity() == 4
    trainer.commit(0)
    assert trainer.capacity() == 4


def test_a_trainer_that_commits_rarely_does_not_stop_its_run(begin):
    story = begin(prompts=30, max_staleness=0, groups_per_step=2)
    trainer = trainer_of(story)
    for step in range(5):
        trainer.publish_policy(step)
        assert trainer.capacity() == 2
        complete(story, step, groups=2)
        assert trainer.capacity() == 0
        trainer.pull(step, BatchSpec(groups=2), policy_version=step)
    assert trainer.commit(4) == 10


def test_without_fields_of_the_run_the_last_pull_counts(begin):
    story = begin(prompts=30)
    trainer = trainer_of(story)
    assert trainer.capacity() == 5 * 16
    complete(story, 0, groups=2)
    trainer.pull(0, BatchSpec(groups=2))
    assert trainer.capacity() == 5 * 2 - 2


def test_no_group_is_begun_that_would_be_too_old_and_the_wait_is_explained(begin):
    story = begin(prompts=30, max_staleness=0, groups_per_step=2)

    def end() -> int | None:
        return transact(story.engine, lambda c: first_not_admitted(c, now(story)))

    assert end() == 2
    story.claim(1)
    # The rest of a group that was begun is always claimed.
    assert end() == 2
    complete(story, 0, groups=1)
    story.claim(1)
    assert (end(), transact(story.engine, lambda c: run_capacity(c, story.run)).free) == (2, 0)
    told = " ".join(transact(story.engine, lambda c: run_status(c, story.run)).waits)
    assert "would be too old when they are trained: 2 groups are ahead of them" in told
    assert "begins 2 at most (max_staleness 0, 2 groups per step)" in told


def test_a_stream_drops_what_is_too_old_for_the_version_of_its_step(begin):
    story = begin(prompts=4)
    for version in (1, 2, 3, 4):
        complete(story, version, groups=1)
    spec = BatchSpec(groups=1, max_staleness=1)
    stream = trainer_of(story).stream(spec, policy_version=lambda step: 2 * step + 3, timeout_s=0)
    assert [numbers(batch) for batch in stream] == [[1], [3]]
    assert drops(story) == {"stale": 2}
