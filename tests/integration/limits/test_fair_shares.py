"""How the Lua script divides calls between runs, under a clock of the test."""

from __future__ import annotations

import pytest
from clocked_limits import Clock, ClockedLimits, Process
from redis.asyncio import Redis

from pipeline.limits.settings import LimitSettings
from pipeline.limits.sync_messages import WaitReason


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
