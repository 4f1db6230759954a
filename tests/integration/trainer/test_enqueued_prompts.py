"""A trainer enqueues prompts once for each key, and cancels what it no longer needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import InputError, NotAllowed, NotFound
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.accounting import check_accounting
from pipeline.trainer.async_client import AsyncTrainerClient
from pipeline.trainer.client import TrainerClient

Begin = Callable[..., tuple[StoredRun, TrainerClient]]


@pytest.fixture
def begin(engine: Engine):
    told: list[tuple[StoredRun, TrainerClient]] = []

    def begin(prompts: int = 0, **config: object) -> tuple[StoredRun, TrainerClient]:
        story = StoredRun(engine, prompts=prompts, **{"n": 2, **config})
        told.append((story, TrainerClient(engine, run=story.run.slug)))
        return told[-1]

    yield begin
    for story, trainer in told:
        trainer.close()
        with engine.connect() as connection:
            assert check_accounting(connection, story.run.run_id) == []


def states(story: StoredRun) -> list[str]:
    return [group["state"] for group in story.groups()]


# --- enqueued prompts


def test_a_key_adds_its_prompts_once_and_names_their_groups_in_order(begin: Begin):
    story, trainer = begin(prompts=1)
    prompts = ["What is 2 + 2?", {"content": "What is 3 + 3?", "answer": "6"}]
    ids = trainer.enqueue(prompts, idempotency_key="step-1")
    assert trainer.enqueue(prompts, idempotency_key="step-1") == ids
    assert [group["group_id"] for group in story.groups()[1:]] == ids
    assert story.states() == {"queued": 6}
    more = trainer.enqueue(prompts, idempotency_key="step-2")
    assert not set(more) & set(ids)


def test_enqueued_prompts_are_pulled_like_others(begin: Begin):
    story, trainer = begin()
    trainer.enqueue([{"content": "What is 3 + 3?", "answer": "6"}], idempotency_key="one")
    story.record(*(story.succeeded(each) for each in story.claim()))
    (group,) = trainer.pull(0, BatchSpec(groups=1)).groups
    assert group.prompt == {"content": "What is 3 + 3?", "answer": "6"}
    trainer.commit(0)
    assert trainer.stats().drained


def test_a_key_that_came_with_other_prompts_is_refused_and_adds_nothing(begin: Begin):
    story, trainer = begin()
    trainer.enqueue(["one"], idempotency_key="step-1")
    with pytest.raises(NotAllowed, match="Row 0 of dataset step-1"):
        trainer.enqueue(["two", "three"], idempotency_key="step-1")
    assert len(story.groups()) == 1


@pytest.mark.parametrize("prompt", ["", {"answer": "6"}, {"content": ""}])
def test_a_prompt_without_text_is_refused_with_all_others(begin: Begin, prompt):
    story, trainer = begin()
    with pytest.raises(InputError, match="Prompt 1 has no text"):
        trainer.enqueue(["one", prompt], idempotency_key="step-1")
    assert story.groups() == []


@pytest.mark.parametrize("key", ["", "k" * 300])
def test_a_key_that_cannot_be_stored_is_refused(begin: Begin, key):
    _, trainer = begin()
    with pytest.raises(InputError, match="idempotency_key"):
        trainer.enqueue(["one"], idempotency_key=key)


# --- cancelled groups


def test_cancelled_groups_are_ready_if_they_have_enough_rollouts_else_dropped(begin: Begin):
    story, trainer = begin(prompts=3, n=3, n_min=2)
    first = story.claim(6)
    story.record(
        *(story.succeeded(each) for each in first if each.rollout_index < 2 - each.group_no)
    )
    ids = [group["group_id"] for group in story.groups()]
    assert trainer.cancel(ids[:2]) == 1 + 2
    assert states(story) == ["ready", "dropped", "open"]
    assert story.groups()[1]["drop_reason"] == "cancelled"
    assert trainer.cancel(ids[:2]) == trainer.cancel([]) == 0
    assert trainer.cancel() == 3
    assert states(story) == ["ready", "dropped", "dropped"]


def test_workers_stop_the_attempts_of_cancelled_groups(begin: Begin):
    story, trainer = begin(prompts=2)
    attempts = story.claim()
    story.beat(*attempts)
    trainer.cancel([attempts[0].group_id])
    stopped = {label.rsplit("-r", 1)[0] for label in story.beat(*attempts)}
    assert stopped == {f"{story.run.slug}-g000000"}


def test_groups_of_older_versions_are_those_dispatched_before_the_publication(begin: Begin):
    story, trainer = begin(prompts=4)
    trainer.publish_policy(1)
    story.claim(2)
    trainer.publish_policy(2)
    story.claim(2)
    ids = [group["group_id"] for group in story.groups()]
    assert trainer.cancel(ids[1:], older_than_version=2) == 0
    assert trainer.cancel(older_than_version=2) == 2
    assert states(story) == ["dropped", "open", "open", "open"]
    with pytest.raises(NotFound, match=r"Version 3 .* was never published"):
        trainer.cancel(older_than_version=3)


async def test_the_asynchronous_client_enqueues_and_cancels_too(begin: Begin, engine: Engine):
    story, _ = begin()
    async with AsyncTrainerClient(TrainerClient(engine, run=story.run.slug)) as trainer:
        ids = await trainer.enqueue(["one", "two"], idempotency_key="step-1")
        assert await trainer.cancel(ids[:1]) == 2
    assert states(story) == ["dropped", "open"]
