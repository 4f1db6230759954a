"""The rules of the Lua script: token buckets and caps, under a clock of the test."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from clocked_limits import Clock, ClockedLimits, Process
from redis.asyncio import Redis

from pipeline.limits.settings import HORIZON_S, LimitSettings
from pipeline.limits.shared_limits import SharedLimits
from pipeline.limits.sync_messages import (
    ReturnedSlot,
    Usage,
    WaitReason,
)

# --- token buckets ---


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("unit", ["requests", "tokens"])
async def test_no_second_gets_more_than_the_limit_and_the_burst(
    unit: str, seed: int, limits: ClockedLimits, clock: Clock
) -> None:
    """100 a second and a burst of 20, for asks of random size at random times."""
    dice = random.Random(seed)
    if unit == "requests":
        await limits.set(LimitSettings(requests_per_minute=6_000, burst=20))
    else:
        await limits.set(LimitSettings(tokens_per_minute=6_000, token_burst=20))
    processes = [Process(limits, name) for name in ("p1", "p2")]
    spent: list[tuple[float, int]] = []
    for _ in range(150):
        clock.now += dice.choice([0.0, 0.003, 0.02, 0.07, 0.5])
        size = 1 if unit == "requests" else dice.randrange(1, 10)
        reply = await dice.choice(processes).ask(dice.randrange(12), tokens=size)
        spent += [(clock.now + grant.delay_s, size) for grant in reply.grants]
    spent.sort()
    largest = max(size for _, size in spent)
    for since, _ in spent:
        in_second = sum(size for at, size in spent if since <= at < since + 1)
        assert in_second <= 120 + largest - 1


async def test_a_new_bucket_has_saved_nothing_up(limits: ClockedLimits) -> None:
    await limits.set(LimitSettings(requests_per_minute=6_000))
    slots = await Process(limits).slots(8)
    assert slots[0] == 0
    assert [after - before for before, after in pairwise(slots)] == pytest.approx(
        [0.0101] * 7, abs=1e-4
    )


async def test_an_idle_bucket_saves_up_its_burst_and_no_more(
    limits: ClockedLimits, clock: Clock
) -> None:
    await limits.set(LimitSettings(requests_per_minute=6_000, burst=6))
    process = Process(limits)
    await process.slots(1)
    clock.now += 1000
    slots = await process.slots(10)
    # Half of the burst is kept for callers that wake late.
    assert slots[:3] == pytest.approx([0, 0, 0], abs=1e-5)
    assert [after - before for before, after in pairwise(slots[2:])] == pytest.approx(
        [0.0101] * (len(slots) - 3), abs=1e-4
    )


async def test_calls_are_reserved_no_further_ahead_than_the_horizon(
    limits: ClockedLimits,
) -> None:
    await limits.set(LimitSettings(requests_per_minute=6_000, burst=1))
    reply = await Process(limits).ask(100)
    assert max(grant.delay_s for grant in reply.grants) <= HORIZON_S
    assert reply.reason is WaitReason.REQUESTS
    assert 0 < reply.retry_in_s <= HORIZON_S


async def test_after_a_pause_calls_start_at_the_steady_pace(
    limits: ClockedLimits, clock: Clock
) -> None:
    await limits.set(LimitSettings(requests_per_minute=6_000, burst=50))
    process = Process(limits)
    await process.slots(1)
    clock.now += 100
    reply = await process.ask(5, backoff_s=2.0)
    assert (reply.reason, reply.grants, reply.pause_s) == (WaitReason.BACKOFF, [], 2.0)
    clock.now += 2.0
    slots = await process.slots(5)
    assert [after - before for before, after in pairwise(slots)] == pytest.approx(
        [0.0101] * 4, abs=1e-4
    )


async def test_a_pause_without_a_length_doubles_each_time_until_a_minute(
    limits: ClockedLimits, clock: Clock
) -> None:
    process = Process(limits)
    pauses = []
    for _ in range(8):
        pauses.append((await process.ask(backoff_s=0.0)).pause_s)
        clock.now += pauses[-1] / 2
        assert (await process.ask(backoff_s=0.0)).pause_s == pytest.approx(pauses[-1] / 2)
        clock.now += pauses[-1] / 2 + 1
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now += 100
    assert (await process.ask(backoff_s=0.0)).pause_s == 1


async def test_a_refund_lets_the_next_call_start_sooner(limits: ClockedLimits) -> None:
    await limits.set(LimitSettings(tokens_per_minute=6_000, token_burst=10))
    process = Process(limits)
    await process.slots(1, tokens=200)
    waiting = await process.ask(1, tokens=10)
    assert (waiting.reason, waiting.grants) == (WaitReason.TOKENS, [])
    assert await process.slots(1, tokens=10, usage=Usage(tokens_owed=-200)) != []


async def test_a_returned_slot_is_given_to_another_process(
    limits: ClockedLimits, clock: Clock
) -> None:
    await limits.set(LimitSettings(requests_per_minute=1_200, burst=1))
    first, second = Process(limits, "p1"), Process(limits, "p2")
    slots = await first.slots(5)
    last = ReturnedSlot(clock.now + slots[-1], 0)
    await first.ask(returned=(last,))
    assert (await second.slots(1)) == pytest.approx([slots[-1]], abs=1e-5)


async def test_a_slot_passes_the_limits_of_its_model_and_of_its_endpoint(
    limits: ClockedLimits, whole: ClockedLimits
) -> None:
    await limits.set(LimitSettings(requests_per_minute=6_000, burst=1))
    await whole.set(LimitSettings(requests_per_minute=3_000, burst=1))
    slots = await Process(limits).slots(20)
    assert [after - before for before, after in pairwise(slots)] == pytest.approx(
        [0.0202] * (len(slots) - 1), abs=1e-4
    )


async def test_a_server_clock_that_was_set_back_stops_no_call(
    limits: ClockedLimits, clock: Clock
) -> None:
    await limits.set(LimitSettings(requests_per_minute=600, burst=1))
    process = Process(limits)
    assert await process.slots(1)
    clock.now -= 300
    assert (await process.ask(1)).retry_in_s < 1
    clock.now += 0.2
    assert await process.slots(1)


# --- caps on calls in flight ---


@pytest.mark.parametrize("seed", range(4))
async def test_no_more_calls_are_in_flight_than_the_caps_of_model_and_endpoint(
    seed: int, client: Redis, prefix: str, clock: Clock, whole: ClockedLimits
) -> None:
    dice = random.Random(seed)
    await whole.set(LimitSettings(max_concurrency=9))
    models = [ClockedLimits(client, prefix, clock, name, whole) for name in ("small", "large")]
    await models[0].set(LimitSettings(max_concurrency=5))
    processes = [Process(model, name) for model in models for name in ("p1", "p2")]
    most = 0
    for _ in range(200):
        clock.now += dice.choice([0.0, 0.05, 0.3])
        process = dice.choice(processes)
        process.held = max(0, process.held - dice.randrange(4))
        await process.ask(dice.randrange(6))
        small, all_ = sum(p.held for p in processes[:2]), sum(p.held for p in processes)
        assert small <= 5
        assert all_ <= 9
        most = max(most, all_)
    assert most == 9


async def test_units_of_a_silent_process_return_after_its_lease(
    limits: ClockedLimits, clock: Clock
) -> None:
    await limits.set(LimitSettings(max_concurrency=3))
    assert len(await Process(limits, "silent").slots(3)) == 3
    other = Process(limits, "other")
    refused = await other.ask(1)
    assert (refused.reason, refused.is_contended) == (WaitReason.CONCURRENCY, True)
    clock.now += 16
    assert len(await other.slots(3)) == 3


class Cap:
    """The adaptive cap of a process that uses all of it."""

    def __init__(self, limits: SharedLimits, clock: Clock) -> None:
        self.process, self.clock = Process(limits), clock

    async def learn(self, *, ok: int = 0, congested: int = 0, each_s: float = 1.0) -> int:
        self.process.held = (await self.process.ask()).cap
        await self.process.ask()
        usage = Usage(ok=ok, congested=congested, latency_sum_s=ok * each_s)
        return (await self.process.ask(usage=usage)).cap


@pytest.fixture
async def cap(limits: ClockedLimits, clock: Clock) -> Cap:
    await limits.set(LimitSettings(adaptive=True))
    return Cap(limits, clock)


async def test_a_fixed_cap_stays(limits: ClockedLimits, clock: Clock) -> None:
    await limits.set(LimitSettings(max_concurrency=9))
    assert await Cap(limits, clock).learn(congested=5) == 9


async def test_the_cap_doubles_per_round_until_it_first_shrinks(cap: Cap) -> None:
    assert await cap.learn(ok=64) == 128
    cap.clock.now += 1
    assert await cap.learn(congested=1) == 89
    cap.clock.now += 2
    assert await cap.learn(ok=89) == 90


async def test_a_burst_of_429_shrinks_the_cap_once_per_round(cap: Cap) -> None:
    await cap.learn(ok=1, each_s=2.0)
    cap.clock.now += 1
    after = await cap.learn(congested=1)
    for _ in range(19):
        cap.clock.now += 0.1
        assert await cap.learn(congested=5) == after
    cap.clock.now += 0.2
    assert await cap.learn(congested=1) < after


async def test_the_cap_does_not_grow_while_it_is_not_used(cap: Cap) -> None:
    cap.process.held = 5
    assert (await cap.process.ask(usage=Usage(ok=10, latency_sum_s=10.0))).cap == 64


async def test_grown_latency_shrinks_the_cap(cap: Cap) -> None:
    before = 0
    for _ in range(20):
        cap.clock.now += 1.1
        before = await cap.learn(ok=10, each_s=1.0)
    for _ in range(3):
        cap.clock.now += 5.0
        after = await cap.learn(ok=10, each_s=4.0)
    assert after < before


async def test_the_cap_never_leaves_its_bounds(limits: ClockedLimits, clock: Clock) -> None:
    await limits.set(LimitSettings(adaptive=True, max_concurrency=30))
    cap = Cap(limits, clock)
    for _ in range(10):
        clock.now += 10
        assert await cap.learn(ok=1000) == 30
    for _ in range(30):
        clock.now += 10
        lowest = await cap.learn(congested=9)
    assert lowest == 1
