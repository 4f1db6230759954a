"""Load balancing over several endpoints that serve the same model.

The runtime keeps one `Replicas` per worker process, and gives each attempt a `ReplicatedClient`
over the clients of its endpoints. Must not: know runs or HTTP, or retry by rules of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import ModelError, ModelTransportError
from workers.core.model_response import ModelResponse
from workers.llm.call_limits import CallLease
from workers.llm.chat_client import ChatClient, PreparedCall

log = logging.getLogger(__name__)

#: A rollout keeps its endpoint while that has at most `_STAY_FACTOR` times as many calls as the
#: least busy one, plus `_STAY_SLACK`: a server with the conversation's prefix in its cache answers
#: faster than an idle server without it.
_STAY_FACTOR, _STAY_SLACK = 2, 8

#: One of these errors means that a server is down; other errors must occur several times in a row.
_DOWN_CODES = frozenset({"connection", "connect_timeout"})
_FAILURES_IN_A_ROW = 3
#: Time for which a failed endpoint gets no calls; doubled with each failed trial call.
_OUT_FIRST_S, _OUT_LAST_S = 1.0, 60.0


@dataclass(eq=False, slots=True)
class Replica:
    """The state of one endpoint in this process."""

    url: str
    in_flight: int = 0  #: calls in progress, including those that wait for a limit
    calls: int = 0
    failures: int = 0  #: consecutive
    outages: int = 0  #: failed trial calls since the last answer, including the first failure
    out_until: float = -math.inf
    is_on_trial: bool = False  #: one trial call is testing whether the endpoint answers again

    def may_be_called(self, now: float) -> bool:
        """Say whether the endpoint is in use, or is due for a trial call and has none yet."""
        return now >= self.out_until and not self.is_on_trial

    def begin(self) -> None:
        """Count the start of a call."""
        self.in_flight += 1
        self.calls += 1
        self.is_on_trial = self.outages > 0

    def end(self) -> None:
        """Count the end of a call, successful or not."""
        self.in_flight -= 1
        self.is_on_trial = False

    def answered(self) -> None:
        """Record an answer. An HTTP error counts too, because it proves that the server is up."""
        if self.outages:
            log.warning("%s answers again; calls go to it.", self.url)
        self.failures = self.outages = 0
        self.out_until = -math.inf

    def failed(self, error: ModelTransportError, now: float) -> None:
        """Record a call without an answer; stop calls to the endpoint if it seems to be down."""
        self.failures += 1
        is_down = error.code in _DOWN_CODES or self.failures >= _FAILURES_IN_A_ROW
        # Calls that the same outage ended count as one failure, not as many.
        if not is_down or now < self.out_until:
            return
        out_s = min(_OUT_FIRST_S * 2**self.outages, _OUT_LAST_S)
        self.outages += 1
        self.out_until = now + out_s
        log.warning("%s is left out for %g s, then tried again: %s", self.url, out_s, error)


class Replicas:
    """The endpoints of this process, by URL.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._by_url: dict[str, Replica] = {}

    def of(self, url: str) -> Replica:
        """Return the state of an endpoint, made at the first call."""
        return self._by_url.setdefault(url, Replica(url))

    def choose(self, replicas: Sequence[Replica], current: Replica | None) -> Replica:
        """Return the endpoint for a call: the rollout's own, or the one with the fewest calls.

        If all endpoints are down, the one whose trial call is due first is returned.
        """
        now = self.clock()
        usable = [replica for replica in replicas if replica.may_be_called(now)]
        if not usable:
            return min(replicas, key=lambda replica: replica.out_until)
        least = min(usable, key=lambda replica: (replica.in_flight, replica.calls))
        most = _STAY_FACTOR * least.in_flight + _STAY_SLACK
        return current if current in usable and current.in_flight <= most else least


class ReplicatedClient:
    """One rollout's client for a model behind several base URLs.

    Args:
        replicas: Shared by all rollouts of this process.
        clients: One per endpoint, by URL, with equal settings.
    """

    def __init__(self, replicas: Replicas, clients: Mapping[str, ChatClient]) -> None:
        self.replicas = replicas
        self.clients = clients
        self.candidates = [replicas.of(url) for url in clients]
        self.current: Replica | None = None

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Request one answer; each try may go to another endpoint.

        Raises:
            ModelError: As in `ChatClient.generate`.
        """
        for client in self.clients.values():
            await client.learn_capture()
        call = _RoutedCall(self, messages, options)
        first = call.prepared(self.candidates[0])
        outcome = await first.client.retries.run(
            call.send, limiter=call, estimated_tokens=first.estimated_tokens
        )
        return call.last.response_of(outcome)


class _RoutedCall:
    """One call, also its own limiter: `acquire` chooses the endpoint and asks its limiter."""

    def __init__(
        self,
        owner: ReplicatedClient,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        self._owner = owner
        self._messages = messages
        self._options = options
        self._prepared: dict[str, PreparedCall] = {}
        self._replica = owner.candidates[0]

    @property
    def last(self) -> PreparedCall:
        return self.prepared(self._replica)

    def prepared(self, replica: Replica) -> PreparedCall:
        if replica.url not in self._prepared:
            client = self._owner.clients[replica.url]
            self._prepared[replica.url] = client.prepare(self._messages, **self._options)
        return self._prepared[replica.url]

    async def acquire(self, estimated_tokens: int) -> CallLease | None:
        owner = self._owner
        self._replica = owner.current = owner.replicas.choose(owner.candidates, owner.current)
        self._replica.begin()
        limiter = self.last.client.limiter
        if limiter is None:
            return None
        try:
            return await limiter.acquire(estimated_tokens)
        except BaseException:
            self._replica.end()
            raise

    async def send(self) -> ModelResponse:
        replica = self._replica
        try:
            response = await self.last.send()
        except ModelTransportError as error:
            replica.failed(error, self._owner.replicas.clock())
            raise
        except ModelError:
            replica.answered()
            raise
        else:
            replica.answered()
            return response
        finally:
            replica.end()

    def note_rate_limited(self, retry_after_s: float | None) -> Awaitable[None] | None:
        limiter = self.last.client.limiter
        return limiter.note_rate_limited(retry_after_s) if limiter else None
