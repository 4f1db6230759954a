import asyncio

from pipeline.limits.wait_queue import Slot, Waiter, WaitQueue


async def queue_of(waiters: int, slots: list[float]) -> WaitQueue:
    queue = WaitQueue("r", 1.0)
    for tokens in range(waiters):
        queue.waiters.append(Waiter(tokens, asyncio.get_running_loop().create_future()))
    for at in slots:
        queue.reserve(Slot(at, at, 0, at))
    return queue


async def test_slots_are_kept_soonest_first() -> None:
    queue = await queue_of(3, [3.0, 1.0, 2.0])
    assert [slot.at for slot in queue.slots] == [1.0, 2.0, 3.0]
    assert queue.unreserved == 0


async def test_callers_beyond_the_slots_are_asked_for_in_their_order() -> None:
    queue = await queue_of(5, [1.0, 2.0])
    assert queue.unreserved == 3
    assert queue.estimates(2) == (2, 3)


async def test_the_latest_slots_are_the_surplus() -> None:
    queue = await queue_of(1, [1.0, 2.0, 3.0])
    assert [slot.at for slot in queue.take_surplus()] == [2.0, 3.0]
    assert [slot.at for slot in queue.slots] == [1.0]


async def test_slots_before_the_end_of_a_pause_are_dropped() -> None:
    queue = await queue_of(3, [1.0, 2.0, 3.0])
    assert queue.drop_before(2.5) == 2
    assert queue.unreserved == 2
