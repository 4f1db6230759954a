"""The rules of the Lua script: token buckets, caps and fair shares, under a clock of the test."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from redis.asyncio import Redis

from benchmarks.limit_fleet import PrivateRedis
from pipeline.limits.settings import HORIZON_S, LimitSettings
from pipeline.limits.shared_limits import SharedLimits, lua_source
from pipeline.limits.status import ANY_MODEL
from pipeline.limits.sync_messages import (
    Demand,
    ReturnedSlot,
    SyncReply,
    SyncRequest,
    Usage,
    WaitReason,
)

START = 1_700_000_000.0


class Clock:
    now = START


class ClockedLimits(SharedLimits):
    """Limits whose script reads the test's clock in place of the server's."""

    def __init__(
        self, client: Redis, prefix: str, clock: Clock, model: str, whole: ClockedLimits | None
    ) -> None:
        super().__init__(client, prefix, "http://e", model, of_endpoint=whole)
        source = lua_source()
        begin = source.index("  local time = redis.call('TIME')")
        end = source.index("\nend", begin)
        read = f"  return tonumber(redis.call('GET', '{prefix}:clock'))"
        self._grant_script = client.register_script(source[:begin] + read + source[end:])
        self._clock, self._clock_key = clock, f"{prefix}:clock"

    async def sync(self, request: SyncRequest) -> SyncReply:
        await self._client.set(self._clock_key, repr(self._clock.now))
        return await super().sync(request)


class Process:
    """A worker process in front of the script: counts the calls that it holds."""

    def __init__(self, limits: SharedLimits, name: str = "p") -> None:
        self.limits, self.name, self.held = limits, name, 0

    async def ask(
        self,
        calls: int = 0,
        *,
        run: str = "r",
        tokens: int = 0,
        weight: float = 1.0,
        returned: tuple[ReturnedSlot, ...] = (),
        usage: Usage | None = None,
        backoff_s: float | None = None,
    ) -> SyncReply:
        known = await self.limits.sync(SyncRequest(process=""))
        reply = await self.limits.sync(
            SyncRequest(
                process=self.name,
                version=known.version,
                endpoint_version=known.endpoint_version,
                held=self.held,
                demands=(Demand(run, weight, calls, (tokens,) * calls),),
                returned=returned,
                usage=usage or Usage(),
                backoff_s=backoff_s,
            )
        )
        self.held += len(reply.grants)
        return reply

    async def slots(self, calls: int, **options: object) -> list[float]:
        """Ask for calls; return when they start, in seconds from now."""
        reply = await self.ask(calls, **options)  # type: ignore[arg-type]
        return [grant.delay_s for grant in reply.grants]


@pytest.fixture
async def client(redis: PrivateRedis) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis.url)
    yield client
    await client.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def whole(client: Redis, prefix: str, clock: Clock) -> ClockedLimits:
    return ClockedLimits(client, prefix, clock, ANY_MODEL, None)


@pytest.fixture
def limits(client: Redis, prefix: str, clock: Clock, whole: ClockedLimits) -> ClockedLimits:
    return ClockedLimits(client, prefix, clock, "m", whole)


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


# --- fair shares ---


async def contend(
    limits: ClockedLimits, clock: Clock, flows: dict[tuple[str, str], float], seconds: float
) -> dict[tuple[str, str], int]:
    """Let flows (run, process) of these weights ask all the time; count their calls."""
    processes = {flow: Process(limits, flow[1]) for flow in flows}
    served = dict.fromkeys(flows, 0)
    until = clock.now + seconds
    while clock.now < until:
        for flow, weight in flows.items():
            reply = await processes[flow].ask(5, run=flow[0], weight=weight)
            served[flow] += len(reply.grants)
        clock.now += 0.02
    return served


async def test_runs_are_served_by_weight_however_many_workers_they_have(
    limits: ClockedLimits, clock: Clock
) -> None:
    await limits.set(LimitSettings(requests_per_minute=12_000, burst=1))
    flows = {("a", "p1"): 3.0, ("b", "p2"): 1.0, ("b", "p3"): 1.0, ("b", "p4"): 1.0}
    served = await contend(limits, clock, flows, 5.0)
    of_b = sum(count for (run, _), count in served.items() if run == "b")
    assert served["a", "p1"] / of_b == pytest.approx(3, rel=0.1)
    assert served["b", "p2"] == pytest.approx(served["b", "p4"], rel=0.1)
    assert sum(served.values()) == pytest.approx(5 * 200 * 0.99, rel=0.05)


async def test_a_run_that_was_idle_is_owed_nothing(limits: ClockedLimits, clock: Clock) -> None:
    await limits.set(LimitSettings(requests_per_minute=12_000, burst=1))
    await contend(limits, clock, {("a", "p1"): 1.0}, 5.0)
    served = await contend(limits, clock, {("a", "p1"): 1.0, ("b", "p2"): 1.0}, 2.0)
    assert served["b", "p2"] == pytest.approx(served["a", "p1"], rel=0.15)


async def test_a_run_that_stops_waiting_for_a_moment_keeps_its_lead(
    limits: ClockedLimits,
) -> None:
    await limits.set(LimitSettings(tokens_per_minute=60_000, token_burst=1_000))
    ahead, behind = Process(limits, "p1"), Process(limits, "p2")
    assert await ahead.slots(1, run="a", tokens=300) == [0]
    await behind.ask(1, run="b", tokens=300)
    for _ in range(2):
        reply = await ahead.ask(1, run="a", tokens=300)
        assert reply.reason is WaitReason.SHARE
        await ahead.ask(0, run="a")


async def test_runs_that_ended_leave_nothing_behind(
    limits: ClockedLimits, clock: Clock, client: Redis, prefix: str
) -> None:
    await limits.set(LimitSettings(requests_per_minute=60_000))
    process = Process(limits)
    for index in range(30):
        await process.ask(3, run=f"run{index}")
        await process.ask(0, run=f"run{index}")
        clock.now += 1
    await process.ask(1, run="last")
    for key in ("flows", "runs", "waits", "due"):
        (name,) = await client.keys(f"{prefix}:*:{key}") or [None]
        size = 0 if name is None else len(await client.dump(name) or b"")
        assert size < 100, key
