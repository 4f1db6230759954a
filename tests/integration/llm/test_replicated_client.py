"""Several endpoints of one model: which takes a call, and what becomes of one that is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest

from pipeline.contract.errors import ModelBadRequest, ModelTransportError
from workers.llm.connections import close_connections
from workers.llm.replicas import Replicas, ReplicatedClient


class Fleet:
    """Endpoints that can be stopped and started, and rollouts that call them."""

    def __init__(self, serve: Callable[..., Any], connect: Any, answer: Any) -> None:
        self._serve, self._connect, self._answer = serve, connect, answer
        self.now_s = 0.0
        self._stacks: list[AsyncExitStack] = []
        self.endpoints: list[Any] = []
        self.urls: list[str] = []
        self.replicas = Replicas(clock=lambda: self.now_s)

    async def start(self, place: int | None = None) -> None:
        """Serve one more endpoint, or one that was stopped, in its old place."""
        stack = AsyncExitStack()
        port = 0 if place is None else int(self.urls[place].split(":")[2].split("/")[0])
        endpoint = await stack.enter_async_context(self._serve(port))
        endpoint.answer(self._answer)
        if place is None:
            self._stacks.append(stack)
            self.endpoints.append(endpoint)
            self.urls.append(endpoint.base_url)
        else:
            self._stacks[place], self.endpoints[place] = stack, endpoint

    async def stop(self, place: int) -> None:
        await self._stacks[place].aclose()

    def rollout(self, **options: Any) -> ReplicatedClient:
        clients = {url: self._connect(url, **options) for url in self.urls}
        return ReplicatedClient(self.replicas, clients)

    def calls(self) -> list[int]:
        return [len(endpoint.seen) for endpoint in self.endpoints]


@pytest.fixture
async def fleet(serve: Any, connect: Any, completion: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(serve, connect, completion("42"))
    for _ in range(3):
        await fleet.start()
    yield fleet
    await close_connections()
    for place in range(3):
        await fleet.stop(place)


async def test_rollouts_spread_over_the_endpoints_and_each_stays_on_its_own(
    fleet: Fleet, ask: Any
) -> None:
    rollouts = [fleet.rollout() for _ in range(30)]
    for _ in range(4):
        answers = await asyncio.gather(*(ask(rollout) for rollout in rollouts))
    assert fleet.calls() == [40, 40, 40]
    assert {a.metadata["endpoint"] for a in answers} == set(fleet.urls)
    for rollout in rollouts:
        before = rollout.current
        await ask(rollout)
        assert rollout.current is before


async def test_a_rollout_leaves_an_endpoint_that_has_far_more_to_do(fleet: Fleet, ask: Any) -> None:
    rollout = fleet.rollout()
    await ask(rollout)
    mine = rollout.current
    assert mine is not None
    mine.in_flight = 8
    await ask(rollout)
    assert rollout.current is mine, "somewhat more is no reason: it knows the conversation"
    mine.in_flight = 9
    await ask(rollout)
    assert rollout.current is not mine


async def test_the_calls_of_an_endpoint_that_dies_go_to_the_others(
    fleet: Fleet, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "workers.llm.replicas")
    rollouts = [fleet.rollout() for _ in range(6)]
    await asyncio.gather(*(ask(rollout) for rollout in rollouts))
    await fleet.stop(0)
    answers = await asyncio.gather(*(ask(rollout) for rollout in rollouts))
    assert fleet.urls[0] not in {a.metadata["endpoint"] for a in answers}
    assert sum(a.metadata.get("retries", 0) for a in answers) == 2, "its two rollouts moved"
    left_out = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert len(left_out) == 1, "told once, not for each call"
    assert left_out[0].startswith(f"{fleet.urls[0]} is left out for 1 s")


async def test_a_dead_endpoint_is_tried_again_by_one_call_at_growing_intervals(
    fleet: Fleet, ask: Any
) -> None:
    await fleet.stop(0)
    dead = fleet.replicas.of(fleet.urls[0])
    failed_at: list[float] = []
    while len(failed_at) < 4:
        calls = dead.calls
        await asyncio.gather(*(ask(fleet.rollout()) for _ in range(4)))
        assert dead.calls - calls <= 2, "the first outage may be met by two, a trial by one"
        if dead.calls > calls:
            failed_at.append(fleet.now_s)
        fleet.now_s += 0.25
    gaps = [later - earlier for earlier, later in pairwise(failed_at)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 1.0
    assert gaps[2] >= 4.0


async def test_an_endpoint_that_came_back_takes_its_share_again(
    fleet: Fleet, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.stop(0)
    await asyncio.gather(*(ask(fleet.rollout()) for _ in range(3)))
    await fleet.start(0)
    fleet.now_s += 60
    await ask(fleet.rollout())
    assert f"{fleet.urls[0]} answers again" in caplog.text
    await asyncio.gather(*(ask(fleet.rollout()) for _ in range(6)))
    assert fleet.calls()[0] == 3


async def test_with_all_endpoints_down_a_call_fails_as_with_one(fleet: Fleet, ask: Any) -> None:
    for place in range(3):
        await fleet.stop(place)
    with pytest.raises(ModelTransportError, match="gave up after 4 tries") as failed:
        await ask(fleet.rollout())
    assert failed.value.code == "connection"
    assert all(replica.in_flight == 0 for replica in map(fleet.replicas.of, fleet.urls))


async def test_a_refusal_is_an_answer_and_leaves_nobody_out(fleet: Fleet, ask: Any) -> None:
    for endpoint in fleet.endpoints:
        endpoint.script.clear()
        endpoint.answer({"error": {"message": "no such model"}}, status=404)
    with pytest.raises(ModelBadRequest):
        await ask(fleet.rollout())
    assert sum(fleet.calls()) == 1
    assert not any(fleet.replicas.of(url).outages for url in fleet.urls)


async def test_stray_server_errors_leave_nobody_out_but_several_in_a_row_do(
    fleet: Fleet, ask: Any, completion: Any
) -> None:
    (url, *_), (endpoint, *_) = fleet.urls, fleet.endpoints
    replica = fleet.replicas.of(url)
    fleet.urls = [url, *fleet.urls[1:]]
    endpoint.script[:] = []
    for status in (500, 500, 200, 503, 503, 503):
        endpoint.answer(completion() if status == 200 else {"error": "busy"}, status=status)
    alone = fleet.rollout(policy={"max_retries": 0})
    alone.candidates = [replica]
    outages = []
    for _ in range(6):
        try:
            await ask(alone)
        except ModelTransportError:
            pass
        outages.append(replica.outages)
    assert outages == [0, 0, 0, 0, 0, 1]


async def test_each_endpoint_has_limits_of_its_own(fleet: Fleet, ask: Any) -> None:
    asked: list[str] = []

    class Limiter:
        def __init__(self, url: str) -> None:
            self.url = url

        async def acquire(self, estimated_tokens: int) -> Any:
            asked.append(self.url)
            return self

        def settle(self, actual_tokens: int, outcome: str) -> None:
            asked.append(outcome)

    rollout = fleet.rollout()
    for url, client in rollout.clients.items():
        client.limiter = Limiter(url)  # pyright: ignore[reportAttributeAccessIssue]
    answer = await ask(rollout)
    assert asked == [answer.metadata["endpoint"], "ok"]
