"""The Lua scripts and the ledger in Python give the same answers to the same asks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from benchmarks.limit_fleet import PrivateRedis
from pipeline.limits.ledger import Answer, Ask, Demand, Outcomes, Returned
from pipeline.limits.memory import MemoryLedger
from pipeline.limits.redis_ledger import SCRIPT_PARTS, RedisLedger, lua_source
from pipeline.limits.settings import LimitSettings

START = 1_700_000_000.0

LIMITS = {
    "none": LimitSettings(),
    "requests": LimitSettings(requests_per_minute=6_000, burst=4),
    "tokens": LimitSettings(tokens_per_minute=60_000, token_burst=300),
    "both": LimitSettings(requests_per_minute=6_000, tokens_per_minute=120_000),
    "cap": LimitSettings(max_concurrency=7),
    "adaptive": LimitSettings(adaptive=True, max_concurrency=40, requests_per_minute=9_000),
}


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


class ClockedLedger(RedisLedger):
    """The script with the test's clock in the place of the server's."""

    def __init__(
        self,
        client: Redis,
        prefix: str,
        clock: Clock,
        *,
        model: str = "m",
        wide: ClockedLedger | None = None,
    ) -> None:
        source = lua_source(*SCRIPT_PARTS)
        begin = source.index("  local time = redis.call('TIME')")
        end = source.index("\nend", begin)
        source = (
            f"{source[:begin]}  return tonumber(redis.call('GET', '{prefix}:clock')){source[end:]}"
        )
        super().__init__(client, f"{prefix}:{model}", ("e", model), wide=wide, source=source)
        self._redis, self._clock, self._clock_key = client, clock, f"{prefix}:clock"

    async def sync(self, ask: Ask) -> Answer:
        await self._redis.set(self._clock_key, repr(self._clock.now))
        return await super().sync(ask)


@pytest.fixture
async def client(redis: PrivateRedis) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis.url)
    yield client
    await client.aclose()


def some_ask(dice: random.Random, clock: Clock, held: dict[str, int], version: int) -> Ask:
    process = dice.choice(["p1", "p2", "p3"])
    held[process] = max(0, held.get(process, 0) - dice.randrange(4))
    ended = dice.randrange(6)
    demands = []
    for run in dice.sample(["r1", "r2", "r3"], dice.randrange(4)):
        waiting = dice.choice([0, 1, 3, 12])
        estimates = tuple(dice.randrange(1, 400) for _ in range(min(waiting, 8)))
        demands.append(Demand(run, float(int(run[1])), waiting, estimates))
    returned = [
        Returned("r1", clock.now + dice.uniform(-0.05, 0.1), dice.randrange(300))
        for _ in range(dice.choice([0, 0, 0, 2]))
    ]
    return Ask(
        process=process,
        lease_s=3.0,
        version=version,
        held=held[process],
        demands=tuple(demands),
        returned=tuple(returned),
        tokens_owed=dice.choice([0, 0, 150, -120]),
        outcomes=Outcomes(ended, dice.choice([0, 0, 0, 1]), ended * dice.uniform(0.05, 0.4)),
        backoff_s=dice.choice([None] * 30 + [0.0, 0.7]),
    )


#: Limits of a model, and those of its whole endpoint beside them.
BOTH = [(name, None) for name in LIMITS] + [
    ("none", "requests"),
    ("none", "cap"),
    ("requests", "tokens"),
    ("tokens", "adaptive"),
    ("cap", "both"),
    ("adaptive", "cap"),
    ("both", "none"),
]


@pytest.mark.parametrize(("limits", "endpoint_limits"), BOTH)
@pytest.mark.parametrize("seed", range(4))
async def test_both_ledgers_answer_alike(
    limits: str, endpoint_limits: str | None, seed: int, client: Redis, prefix: str
) -> None:
    dice, clock = random.Random(seed), Clock()
    wide = MemoryLedger(clock=clock), ClockedLedger(client, prefix, clock, model="*")
    if endpoint_limits:
        wide[0].configure(LIMITS[endpoint_limits])
        await wide[1].set(LIMITS[endpoint_limits])
    pairs = {
        model: (
            MemoryLedger(clock=clock, model=model, wide=wide[0]),
            ClockedLedger(client, prefix, clock, model=model, wide=wide[1]),
        )
        for model in ("small", "large")
    }
    for memory, lua in pairs.values():
        memory.configure(LIMITS[limits])
        await lua.set(LIMITS[limits])
    held: dict[str, dict[str, int]] = {"small": {}, "large": {}}
    for step in range(250):
        clock.now += dice.choice([0.0, 0.001, 0.01, 0.05, 0.3, 1.5])
        model = dice.choice(["small", "large"])
        ask = some_ask(dice, clock, held[model], 0)
        answers = []
        for ledger in pairs[model]:
            known = await ledger.sync(Ask(process=""))
            told = replace(ask, version=known.version, wide_version=known.wide_version)
            answers.append(await ledger.sync(told))
        mine, theirs = answers
        held[model][ask.process] += len(mine.grants)

        where = f"seed {seed} step {step} model {model}: {ask}"
        assert [g.demand for g in theirs.grants] == [g.demand for g in mine.grants], where
        for name in (
            *("reason", "is_wide", "waiting", "in_flight", "cap"),
            *("is_contended", "granted", "calls"),
        ):
            assert getattr(theirs, name) == getattr(mine, name), f"{name} at {where}"
        for name in ("now", "retry_in_s", "pause_s"):
            assert getattr(theirs, name) == pytest.approx(getattr(mine, name), abs=1e-4), where
        for ours, other in zip(mine.grants, theirs.grants, strict=True):
            assert other.delay_s == pytest.approx(ours.delay_s, abs=1e-4), where
            assert other.tokens == ours.tokens, where


async def test_a_server_clock_that_was_set_back_stops_nobody(client: Redis, prefix: str) -> None:
    clock = Clock()
    ledger = ClockedLedger(client, prefix, clock)
    await ledger.set(LimitSettings(requests_per_minute=600, burst=1))
    ask = Ask(process="p", demands=(Demand("r", 1.0, 1, (0,)),))
    assert (await ledger.sync(ask)).grants
    clock.now -= 300
    answer = await ledger.sync(ask)
    assert answer.retry_in_s < 1
    clock.now += 0.2
    assert (await ledger.sync(ask)).grants
