import asyncio

from pipeline.limits.waiting import Line, Slot, Waiter


async def line_of(waiters: int, slots: list[float]) -> Line:
    line = Line("r", 1.0)
    for tokens in range(waiters):
        line.waiters.append(Waiter(tokens, 0.0, asyncio.get_running_loop().create_future()))
    for at in slots:
        line.reserve(Slot(at, at, 0, at))
    return line


async def test_slots_are_kept_soonest_first() -> None:
    line = await line_of(3, [3.0, 1.0, 2.0])
    assert [slot.at for slot in line.slots] == [1.0, 2.0, 3.0]
    assert line.unreserved == 0


async def test_callers_beyond_the_slots_are_asked_for_in_their_order() -> None:
    line = await line_of(5, [1.0, 2.0])
    assert line.unreserved == 3
    assert line.estimates(2) == (2, 3)


async def test_the_latest_slots_are_the_surplus() -> None:
    line = await line_of(1, [1.0, 2.0, 3.0])
    assert [slot.at for slot in line.take_surplus()] == [2.0, 3.0]
    assert [slot.at for slot in line.slots] == [1.0]


async def test_slots_before_the_end_of_a_pause_are_dropped() -> None:
    line = await line_of(3, [1.0, 2.0, 3.0])
    assert line.drop_before(2.5) == 2
    assert line.unreserved == 2
