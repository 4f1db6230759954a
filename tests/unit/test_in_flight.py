"""The attempts of a worker that stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from workers.process.in_flight import InFlight


def attempt_of(number: int) -> Any:
    return SimpleNamespace(request=SimpleNamespace(key=("rollout", number)))


async def test_an_attempt_that_starts_after_all_were_handed_back_is_handed_back_too():
    in_flight, started = InFlight(), asyncio.Event()

    async def run(number: int) -> None:
        with in_flight.entered(attempt_of(number)):
            started.set()
            await asyncio.sleep(60)

    early = asyncio.create_task(run(1))
    await started.wait()
    assert in_flight.hand_back_all() == 1
    late = asyncio.create_task(run(2))
    for task, number in ((early, 1), (late, 2)):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        assert in_flight.is_handed_back(attempt_of(number))
    assert len(in_flight) == 0
