"""How the model calls of a worker follow the policy of their run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import pytest

from pipeline.contract.errors import ERROR_TABLE, Action, PolicyPaused
from pipeline.contract.model_call import ModelCall
from pipeline.contract.policy import Policy
from workers.core.model_response import ModelResponse
from workers.process.policies import Policies, PolicyClient

RUN = UUID(int=7)
Answer = Callable[[], Awaitable[ModelResponse]]


def published(serial: int, *, version: int | None = None, **fields: Any) -> Policy:
    version = serial if version is None else version
    return Policy(run_id=RUN, serial=serial, version=version, **fields)


class Endpoint:
    """A client that notes where its calls go; `answer` is what a call does."""

    def __init__(self) -> None:
        self.policies = Policies()
        self.called: list[tuple[str, ...]] = []
        self.answer: Answer = self.at_once
        self.reported: int | None = None

    async def at_once(self) -> ModelResponse:
        return ModelResponse("7", policy_version=self.reported)

    def attempt(self, *, pause_wait_s: float = 5.0) -> PolicyClient:
        return PolicyClient(self.policies.of(RUN), self.client_of, pause_wait_s=pause_wait_s)

    def client_of(self, endpoints: tuple[str, ...]) -> Any:
        endpoint = self

        class Client:
            async def generate(self, messages: Sequence[Any], **_: Any) -> ModelResponse:
                endpoint.called.append(endpoints)
                return await endpoint.answer()

        return Client()

    def learn(self, *policies: Policy) -> None:
        self.policies.learn(policies)


async def version_of(client: PolicyClient) -> int | None:
    """Return the version that counts for a call, as its record has it."""
    response = await client.generate([])
    before = response.metadata.get("policy_version_before")
    call = ModelCall(
        sequence=0, policy_version=response.policy_version, policy_version_before=before
    )
    return call.version_min


def test_a_call_without_a_published_policy_carries_no_version():
    assert asyncio.run(version_of(Endpoint().attempt())) is None


def test_a_call_carries_the_published_version_unless_its_server_reports_one():
    endpoint = Endpoint()

    async def work() -> list[int | None]:
        endpoint.learn(published(3))
        client = endpoint.attempt()
        first = await version_of(client)
        endpoint.reported = 9
        return [first, await version_of(client)]

    assert asyncio.run(work()) == [3, 9]


@pytest.mark.parametrize(("before", "least"), [([], 0), ([published(1, version=4)], 4)])
def test_a_call_during_which_weights_change_carries_the_older_version(before, least):
    endpoint = Endpoint()

    async def change() -> ModelResponse:
        endpoint.learn(published(2, version=5))
        return await endpoint.at_once()

    async def work() -> int | None:
        endpoint.learn(*before)
        endpoint.answer = change
        return await version_of(endpoint.attempt())

    assert asyncio.run(work()) == least
    assert len(endpoint.called) == 1


def test_an_older_publication_that_arrives_late_changes_nothing():
    endpoint = Endpoint()

    async def work() -> int | None:
        endpoint.learn(published(2, version=8), published(1, version=7, mode="pause"))
        return await version_of(endpoint.attempt())

    assert asyncio.run(work()) == 8


def test_calls_of_an_attempt_under_way_go_to_the_new_endpoints():
    endpoint = Endpoint()

    async def work() -> None:
        client = endpoint.attempt()
        await client.generate([])
        endpoint.learn(published(1, endpoints=("http://b/v1",)))
        await client.generate([])

    asyncio.run(work())
    assert endpoint.called == [(), ("http://b/v1",)]


def test_a_call_waits_while_the_policy_is_paused_and_then_asks_the_new_one():
    endpoint = Endpoint()

    async def work() -> int | None:
        endpoint.learn(published(1, mode="pause"))
        waiting = asyncio.create_task(version_of(endpoint.attempt()))
        await asyncio.sleep(0)
        assert not endpoint.called
        endpoint.learn(published(2, version=1, mode="pause"))
        await asyncio.sleep(0)
        assert not endpoint.called
        endpoint.learn(published(3, version=2))
        return await waiting

    assert asyncio.run(work()) == 2


def test_a_pause_that_takes_too_long_ends_the_attempt_and_says_when_to_come_back():
    endpoint = Endpoint()

    async def work() -> None:
        endpoint.learn(published(1, mode="pause"))
        await endpoint.attempt(pause_wait_s=0.01).generate([])

    with pytest.raises(PolicyPaused, match=r"paused for more than 0\.01 s") as error:
        asyncio.run(work())
    assert error.value.retry_after_s == 5
    assert ERROR_TABLE[error.value.error_class] is Action.RETRY_FREE
    assert endpoint.called == []


def test_a_pause_or_another_version_lets_calls_under_way_finish():
    endpoint = Endpoint()

    async def work() -> int | None:
        async def answer() -> ModelResponse:
            endpoint.learn(published(2, mode="pause"), published(3))
            await asyncio.sleep(0)
            return await endpoint.at_once()

        endpoint.learn(published(1))
        endpoint.answer = answer
        return await version_of(endpoint.attempt())

    assert asyncio.run(work()) == 1


def test_abort_repeats_calls_under_way_on_the_new_weights():
    endpoint = Endpoint()
    cut_off: list[bool] = []

    async def work() -> int | None:
        began = asyncio.Event()

        async def answer() -> ModelResponse:
            endpoint.answer = endpoint.at_once
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cut_off.append(True)
                raise
            raise AssertionError("it was not cut off")

        endpoint.learn(published(1))
        endpoint.answer = answer
        call = asyncio.create_task(version_of(endpoint.attempt()))
        await began.wait()
        # Two in a row, before the call hears of the first.
        endpoint.learn(published(2, mode="abort"), published(3, mode="abort"))
        return await call

    assert asyncio.run(work()) == 3
    assert (cut_off, len(endpoint.called)) == ([True], 2)


def test_a_call_that_streams_is_not_repeated():
    endpoint = Endpoint()

    async def work() -> None:
        async def answer() -> ModelResponse:
            endpoint.learn(published(2, mode="abort"))
            await asyncio.sleep(0)
            return await endpoint.at_once()

        endpoint.answer = answer
        await endpoint.attempt().generate([], on_delta=print)

    asyncio.run(work())
    assert len(endpoint.called) == 1


def test_a_cancelled_attempt_is_not_taken_for_an_aborted_call():
    endpoint = Endpoint()

    async def work() -> None:
        async def answer() -> ModelResponse:
            await asyncio.sleep(60)
            raise AssertionError

        endpoint.learn(published(1))
        endpoint.answer = answer
        call = asyncio.create_task(version_of(endpoint.attempt()))
        while not endpoint.called:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(work())


def test_a_timeout_of_the_client_stays_an_error():
    endpoint = Endpoint()

    async def work() -> None:
        async def answer() -> ModelResponse:
            raise TimeoutError("the client's own")

        endpoint.answer = answer
        await endpoint.attempt().generate([])

    with pytest.raises(TimeoutError, match="the client's own"):
        asyncio.run(work())
