"""A batch has as many groups, or sampled tokens, as its spec asks for, in the order it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.store import batch_leases
from pipeline.trainer.client import TrainerClient


def trainer_of(engine: Engine, sampled: Sequence[int], *, more: int = 0) -> TrainerClient:
    """Return a client for groups of two rollouts, the first of which sampled so many tokens.

    The second one of each group sampled 1. `more` groups have no outcome yet.
    """
    story = StoredRun(engine, prompts=len(sampled) + more, n=2)
    story.record(
        *(
            story.succeeded(
                each,
                float(each.rollout_index),
                completion_tokens=1 if each.rollout_index else sampled[each.group_no] - 1,
            )
            for each in story.claim(2 * len(sampled))
        )
    )
    return TrainerClient(engine, run=story.run.slug)


def numbers(trainer: TrainerClient, step: int, spec: BatchSpec) -> list[int]:
    return [group.group_no for group in trainer.pull(step, spec).groups]


def test_a_batch_of_tokens_ends_with_the_group_that_reaches_them(engine):
    trainer = trainer_of(engine, [10, 10, 30, 5, 5, 5], more=1)
    assert numbers(trainer, 0, BatchSpec(tokens=20)) == [0, 1]
    assert numbers(trainer, 1, BatchSpec(tokens=20)) == [2]
    assert numbers(trainer, 2, BatchSpec(tokens=11)) == [3, 4, 5]
    assert trainer.pull(2, BatchSpec(tokens=1)).replayed


def test_too_few_tokens_are_named_and_leased_only_when_the_run_has_no_more(engine):
    trainer = trainer_of(engine, [10, 10, 30], more=1)
    with pytest.raises(NotReady) as waiting:
        trainer.pull(0, BatchSpec(tokens=51))
    assert "too few groups ready for 51 tokens: 3" in str(waiting.value)
    assert (
        "The trainer waits for 51 sampled tokens and 3 groups with 50 are ready: 1 are open"
        in str(waiting.value)
    )
    finished = trainer_of(engine, [10, 10, 30])
    assert numbers(finished, 0, BatchSpec(tokens=51)) == [0, 1, 2]
    with pytest.raises(NotReady) as over:
        finished.pull(1, BatchSpec(tokens=51))
    assert over.value.drained


@pytest.mark.parametrize("more", [0, 1])
def test_a_batch_of_tokens_may_have_more_groups_than_are_looked_at_first(engine, monkeypatch, more):
    monkeypatch.setattr(batch_leases, "_FIRST_GROUPS", 2)
    trainer = trainer_of(engine, [2] * 12, more=more)
    assert numbers(trainer, 0, BatchSpec(tokens=20)) == list(range(10))


def test_the_stalest_groups_come_first_or_those_that_became_ready_first(engine):
    story = StoredRun(engine, prompts=3, n=1, n_min=1)
    for each in reversed(story.claim()):
        story.record(story.succeeded(each, version_min=each.group_no, version_max=7))
    trainer = TrainerClient(engine, run=story.run.slug)
    assert numbers(trainer, 0, BatchSpec(groups=3, min_group_size=1)) == [0, 1, 2]
    trainer.abandon(0, reason="another order")
    fifo = BatchSpec(groups=3, min_group_size=1, order="fifo")
    assert numbers(trainer, 0, fifo) == [2, 1, 0]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"groups": 2, "tokens": 9}, "groups and tokens exclude each other"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"require_full_groups": True, "group_deadline_s": 9.0}, "is not full"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        BatchSpec(**fields)


def test_a_batch_has_sixteen_groups_where_nothing_is_said():
    assert BatchSpec() == BatchSpec(groups=16)
    assert BatchSpec(tokens=100).groups is None


def test_groups_that_are_too_small_for_a_batch_are_counted_and_end_no_later_than_the_run(engine):
    story = StoredRun(engine, prompts=3, n=3)
    attempts = story.claim()
    partial = [each for each in attempts if (each.group_no, each.rollout_index) != (1, 0)]
    story.record(*(story.succeeded(each) for each in partial if each.group_no < 2))
    story.record(story.failed(attempts[3], ErrorClass.CONTRACT))
    trainer = TrainerClient(engine, run=story.run.slug)
    full = BatchSpec(groups=1, require_full_groups=True)
    assert numbers(trainer, 0, full) == [0]
    with pytest.raises(NotReady, match="1 are ready with too few usable rollouts") as waiting:
        trainer.pull(1, full)
    assert "has 0 of 1 groups ready. The trainer waits for 1 groups and 0" in str(waiting.value)
    assert (waiting.value.stats.too_small, waiting.value.drained) == (1, False)
    story.record(*(story.succeeded(each) for each in attempts if each.group_no == 2))
    stream = trainer.stream(full, start_step=1, timeout_s=60)
    assert [group.group_no for batch in stream for group in batch.groups] == [2]
    with pytest.raises(NotReady, match="dropped, and 1 too small for the batch"):
        trainer.pull(2, full)
    assert numbers(trainer, 2, BatchSpec(groups=1)) == [1]
