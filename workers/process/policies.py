"""The newest policies of runs that reached this worker, and the model calls that follow them.

Requests bring the policy of their run, and the dispatcher's command a newer one. A call goes to the
current endpoints, waits while the policy is paused, is repeated if a new policy asks for that, and
carries the versions known before and after it. Must not: leave the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from pipeline.contract.errors import PolicyPaused
from pipeline.contract.policy import Policy
from workers.core.model_response import ModelResponse
from workers.process.agent_timeout import off_the_clock
from workers.process.model_calls import ModelClient
from workers.process.unclocked_limiter import bounded_wait_s

#: Runs whose policies are kept; a worker serves few runs at a time.
_MAX_RUNS = 256
#: Wait before a rollout is tried again; nothing is dispatched while its policy is paused.
_RETRY_AFTER_S = 5.0


class RunPolicy:
    """The policy of one run; None until one is published."""

    def __init__(self) -> None:
        self.current: Policy | None = None
        self._changed = asyncio.Event()
        self._under_way: set[asyncio.Timeout] = set()

    def learn(self, policy: Policy) -> None:
        """Take a newer publication; calls under way are cut off if it asks for that."""
        if self.current is not None and policy.serial <= self.current.serial:
            return
        self.current = policy
        self._changed.set()
        self._changed = asyncio.Event()
        if policy.mode == "abort":
            now = asyncio.get_running_loop().time()
            # A call that is being cut off cannot be cut off again.
            under_way, self._under_way = self._under_way, set()
            for call in under_way:
                call.reschedule(now)

    async def wait_unpaused(self, timeout_s: float) -> None:
        """Wait while the policy is paused.

        Raises:
            PolicyPaused: The policy was paused for all this time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.current is not None and self.current.mode == "pause":
                    await self._changed.wait()
        except TimeoutError:
            raise PolicyPaused(
                f"The policy was paused for more than {timeout_s:g} s; the rollout is tried again.",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    async def until_aborted(
        self, call: Callable[[], Awaitable[ModelResponse]]
    ) -> ModelResponse | None:
        """Return the response of a call; None if a new policy cut it off."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._under_way.add(scope)
                try:
                    return await call()
                finally:
                    self._under_way.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            return None


class Policies:
    """The policies of the runs of this worker."""

    def __init__(self) -> None:
        self._runs: dict[UUID, RunPolicy] = {}

    def of(self, run_id: UUID) -> RunPolicy:
        """Return the policy of a run."""
        known = self._runs.pop(run_id, None) or RunPolicy()
        # The order is that of the last use: the first run is dropped.
        self._runs[run_id] = known
        if len(self._runs) > _MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        return known

    def learn(self, policies: Iterable[Policy | None]) -> None:
        """Take publications; older ones than those known change nothing."""
        for policy in policies:
            if policy is not None:
                self.of(policy.run_id).learn(policy)


class PolicyClient:
    """The model client of one attempt, which follows the policy of its run.

    Args:
        policy: The policy of the run.
        client_of: Returns the client of some base URLs; none: those of the request.
        pause_wait_s: Longest wait for a paused policy.
    """

    def __init__(
        self,
        policy: RunPolicy,
        client_of: Callable[[tuple[str, ...]], ModelClient],
        *,
        pause_wait_s: float,
    ) -> None:
        self._policy = policy
        self._client_of = client_of
        self._pause_wait_s = pause_wait_s
        self._endpoints: tuple[str, ...] | None = None
        self._client: ModelClient | None = None
        self._current_client()

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Request one response of the current policy.

        Raises:
            PolicyPaused: The policy was paused for too long.
            ModelError: The client's error.
        """
        known = self._policy
        while True:
            if known.current is not None and known.current.mode == "pause":
                wait_s = bounded_wait_s(self._pause_wait_s)
                await off_the_clock(known.wait_unpaused(wait_s))
            began = known.current
            call = partial(self._current_client().generate, messages, **options)
            # Streamed deltas cannot be withdrawn, so a streamed call is not repeated.
            response = await (call() if "on_delta" in options else known.until_aborted(call))
            if response is not None:
                return _stamped(response, began, known.current)

    def _current_client(self) -> ModelClient:
        current = self._policy.current
        endpoints = current.endpoints if current is not None else ()
        if self._client is None or endpoints != self._endpoints:
            self._client, self._endpoints = self._client_of(endpoints), endpoints
        return self._client


def _stamped(response: ModelResponse, before: Policy | None, after: Policy | None) -> ModelResponse:
    if response.policy_version is not None or after is None:
        return response
    # Weights may have changed during the call, and the smaller version counts. Before the first
    # publication it is 0, that of the weights with which the run began.
    began = {"policy_version_before": 0 if before is None else before.version}
    return replace(response, policy_version=after.version, metadata={**response.metadata, **began})
