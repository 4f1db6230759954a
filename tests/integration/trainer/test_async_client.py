"""The trainer's client for asyncio: the same batches, and nothing left behind."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fixtures.stored_run import StoredRun

from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.trainer.async_client import AsyncTrainerClient
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch

TWO = BatchSpec(groups=2)
Work = Callable[[AsyncTrainerClient], Awaitable[Any]]


@pytest.fixture
def story(engine) -> StoredRun:
    """Four complete groups of six."""
    story = StoredRun(engine, prompts=6, n=2)
    complete(story, 4)
    return story


def complete(story: StoredRun, groups: int) -> None:
    story.record(*(story.succeeded(a, float(a.rollout_index)) for a in story.claim(groups * 2)))


def run(story: StoredRun, work: Work, *, lease_s: float = 3600.0) -> Any:
    """Run work with a client, and see that no thread of it is left."""
    before = threading.active_count()

    async def main() -> Any:
        client = TrainerClient(story.engine, run=story.run.slug, lease_s=lease_s)
        async with AsyncTrainerClient(client) as trainer:
            return await asyncio.wait_for(work(trainer), 60)

    try:
        return asyncio.run(main())
    finally:
        assert threading.active_count() <= before
        left = [each.name for each in threading.enumerate() if "rollout-trainer" in each.name]
        assert left == []


def numbers(batch: TrainBatch) -> list[int]:
    return [group.group_no for group in batch.groups]


def test_it_has_the_methods_of_the_other_client():
    own = {name for name, _ in inspect.getmembers(AsyncTrainerClient, inspect.isfunction)}
    other = {name for name, _ in inspect.getmembers(TrainerClient, inspect.isfunction)}
    # What `pull` and `stream` are made of is not for callers.
    missing = {name for name in other - own if not name.startswith("_")}
    assert missing == {"try_pull", "wait_for_groups", "next_step"}


def test_a_stream_pulls_and_commits_like_the_other_client(story):
    async def work(trainer: AsyncTrainerClient) -> list[list[int]]:
        seen: list[list[int]] = []
        async for batch in trainer.stream(TWO, timeout_s=0.0):
            seen.append(numbers(batch))
            assert await trainer.commit(batch.step) == 2
            if batch.step == 1:
                return seen
        return seen

    assert run(story, work) == [[0, 1], [2, 3]]


def test_a_pull_waits_on_no_thread_that_others_need(story):
    async def work(trainer: AsyncTrainerClient) -> list[int]:
        await trainer.pull(0, BatchSpec(groups=4))
        waiting = asyncio.create_task(trainer.pull(1, TWO, timeout_s=50))
        await asyncio.sleep(0)
        assert await trainer.commit(0) == 4
        assert not waiting.done()
        await asyncio.to_thread(complete, story, 2)
        return numbers(await waiting)

    assert run(story, work) == [4, 5]


def test_a_pull_in_vain_says_why(story):
    async def work(trainer: AsyncTrainerClient) -> None:
        await trainer.pull(0, BatchSpec(groups=9), timeout_s=0.1)

    with pytest.raises(NotReady, match="has 4 of 9 groups ready"):
        run(story, work)


def test_the_next_batch_is_pulled_while_one_trains(story):
    async def work(trainer: AsyncTrainerClient) -> list[list[int]]:
        first = await trainer.pull(0, TWO)
        trainer.prefetch(1, TWO)
        trainer.prefetch(1, TWO)
        while (await trainer.stats()).groups["leased"] < 4:
            await asyncio.sleep(0.01)
        second = await trainer.pull(1)
        assert not second.replayed
        return [numbers(first), numbers(second)]

    assert run(story, work) == [[0, 1], [2, 3]]


def test_a_prefetch_that_was_in_vain_is_pulled_again(story):
    async def work(trainer: AsyncTrainerClient) -> list[int]:
        await trainer.pull(0, BatchSpec(groups=4))
        trainer.prefetch(1, TWO, timeout_s=0.0)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(complete, story, 2)
        return numbers(await trainer.pull(1, TWO, timeout_s=30))

    assert run(story, work) == [4, 5]


def test_a_pull_waits_for_a_prefetch_no_longer_than_it_says(story):
    async def work(trainer: AsyncTrainerClient) -> None:
        trainer.prefetch(0, BatchSpec(groups=9), timeout_s=600)
        await trainer.pull(0, timeout_s=0.1)

    with pytest.raises(NotReady, match="has 4 of 9 groups ready"):
        run(story, work)


def test_a_cancelled_pull_and_a_forgotten_prefetch_leave_nothing_behind(story):
    async def work(trainer: AsyncTrainerClient) -> None:
        trainer.prefetch(7, BatchSpec(groups=9))
        waiting = asyncio.create_task(trainer.pull(0, BatchSpec(groups=9), timeout_s=60))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait({waiting})

    run(story, work)


def test_leases_are_renewed_while_a_step_trains(story):
    async def work(trainer: AsyncTrainerClient) -> int:
        await trainer.pull(0, BatchSpec(groups=4))
        lease = "SELECT lease_until > now() AS lives, lease_until AS until FROM train_batches"
        (first,) = story.rows(lease)
        # Train for longer than the lease, as far as the store can see.
        while (now := story.rows(lease)[0])["until"] == first["until"]:
            await asyncio.sleep(0.02)
        assert now["lives"]
        return await trainer.commit(0)

    assert run(story, work, lease_s=3.0) == 4
