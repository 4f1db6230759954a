"""Bursts of 429s and calls without an answer: the rate holds, and no unit leaks. C15."""

import asyncio
import random
import time

import pytest

from benchmarks.faults import injections
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.invariants import find_early_calls
from benchmarks.faults.runs import FaultRun
from faults.rules import BOTH, MANY, judge
from pipeline.limits.settings import LimitSettings
from pipeline.limits.status import LimitStatus
from pipeline.limits.store import LimitStore

CALLS_PER_S = 50
BURST = 20
LEARNED_S = 2.5


# Limits and their calls do not go through the broker.
@pytest.mark.parametrize("deployments", ["redis"], indirect=True)
def test_no_storm_raises_the_rate_of_calls(deployment: Deployment, seeded: random.Random):
    limits = LimitSettings(requests_per_minute=60 * CALLS_PER_S, burst=BURST, max_concurrency=60)
    asyncio.run(set_limits(deployment, limits))
    # Workers that call nobody learn of new limits within about a second.
    time.sleep(LEARNED_S)
    try:
        run = FaultRun(deployment, groups=MANY, name="stormy", gated=True)
        run.wait_running(BOTH)
        run.note_fault("C15")
        run.open_gate()
        injections.storm(deployment, seeded)
        figures = judge(run)
    finally:
        asyncio.run(set_limits(deployment, LimitSettings()))
    assert figures.failed == 0
    calls = run.evidence().calls
    assert sum(call["status"] == 429 for call in calls) > 10, "there was a storm"
    times = [call["at"] for call in calls]
    ((opened_at, _), *_) = run.faults
    early = find_early_calls(times, since=opened_at, limit_per_s=CALLS_PER_S, burst=BURST)
    assert list(early) == []
    # Waiting is no failure: it uses none of the attempts that count.
    assert max(row["attempts_used"] for row in run.evidence().rollouts) <= 2
    deployment.wait_until(lambda: deployment.model.stats()["in_flight"] == 0, what="no open call")
    deployment.wait_until(lambda: in_flight(deployment) == 0, what="no unit kept")


def in_flight(deployment: Deployment) -> int:
    return sum(status.in_flight for status in asyncio.run(show_limits(deployment)))


async def set_limits(deployment: Deployment, limits: LimitSettings) -> None:
    store = LimitStore.connect(deployment.limits_url, prefix="rollout:limits")
    await store.set(deployment.model.base_url, "mock", limits)
    await store.close()


async def show_limits(deployment: Deployment) -> list[LimitStatus]:
    store = LimitStore.connect(deployment.limits_url, prefix="rollout:limits")
    try:
        return await store.show()
    finally:
        await store.close()
