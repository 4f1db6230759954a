"""Several endpoints that serve the same model: where the next call of a rollout goes.

The runtime keeps one `Replicas` per worker process, and gives each attempt a `ReplicatedClient`
over the clients of its endpoints. Must not: know runs or HTTP, or retry by rules of its own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import ModelError, ModelTransportError
from workers.core.model_response import ModelResponse
from workers.llm.call_limits import CallLease, CallStatus
from workers.llm.chat_client import ChatClient, PreparedCall

log = logging.getLogger(__name__)

#: A rollout leaves its endpoint for one with fewer calls when its own has more than
#: `_STAY_FACTOR` times as many, and `_STAY_SLACK` beyond: a server that knows the beginning of a
#: conversation answers faster than an idle one that must read it all.
_STAY_FACTOR, _STAY_SLACK = 2, 8

#: Errors by which a server is down; others count only as several in a row.
_DOWN_CODES = frozenset({"connection", "connect_timeout"})
_FAILURES_IN_A_ROW = 3
#: How long an endpoint is left out: doubled with each trial that fails.
_OUT_FIRST_S, _OUT_LAST_S = 1.0, 60.0


@dataclass(eq=False, slots=True)
class Replica:
    """One endpoint as this process sees it."""

    url: str
    in_flight: int = 0  #: calls under way, those that wait for a limit included
    calls: int = 0
    failures: int = 0  #: in a row
    outages: int = 0  #: failed trials since the last answer, the first failure included
    out_until: float = -math.inf
    is_on_trial: bool = False  #: a call tries whether it answers again

    def may_be_called(self, now: float) -> bool:
        """Whether it is not left out; of one that was, whether no trial is under way."""
        return now >= self.out_until and not self.is_on_trial

    def begin(self) -> None:
        """Count a call that begins."""
        self.in_flight += 1
        self.calls += 1
        self.is_on_trial = self.outages > 0

    def end(self) -> None:
        """Count a call that ended, however it did."""
        self.in_flight -= 1
        self.is_on_trial = False

    def answered(self) -> None:
        """Note an answer, be it a refusal: the server is there."""
        if self.outages:
            log.warning("%s answers again; calls go to it.", self.url)
        self.failures = self.outages = 0
        self.out_until = -math.inf

    def failed(self, error: ModelTransportError, now: float) -> None:
        """Note a call without an answer; leaves the endpoint out where it seems to be down."""
        self.failures += 1
        is_down = error.code in _DOWN_CODES or self.failures >= _FAILURES_IN_A_ROW
        # The calls that an outage ends all at once are one reason to wait, not many.
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
        """Return the one state of an endpoint."""
        return self._by_url.setdefault(url, Replica(url))

    def choose(self, replicas: Sequence[Replica], kept: Replica | None) -> Replica:
        """Return where a call goes: the rollout's endpoint, or the one with the fewest calls.

        With all of them left out it is the one whose next trial is due first.
        """
        now = self.clock()
        usable = [replica for replica in replicas if replica.may_be_called(now)]
        if not usable:
            return min(replicas, key=lambda replica: replica.out_until)
        least = min(usable, key=lambda replica: (replica.in_flight, replica.calls))
        most = _STAY_FACTOR * least.in_flight + _STAY_SLACK
        return kept if kept in usable and kept.in_flight <= most else least


class ReplicatedClient:
    """A model behind several base URLs, as one rollout calls it.

    Args:
        replicas: Shared by all rollouts of this process.
        clients: One for each endpoint, by its URL; their settings are alike.
    """

    def __init__(self, replicas: Replicas, clients: Mapping[str, ChatClient]) -> None:
        self.replicas = replicas
        self.clients = clients
        self.among = [replicas.of(url) for url in clients]
        self.kept: Replica | None = None

    async def generate(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> ModelResponse:
        """Ask for one answer; each try may go to another endpoint.

        Raises:
            ModelError: As `ChatClient.generate`.
        """
        call = _RoutedCall(self, messages, options)
        first = call.prepared(self.among[0])
        outcome = await first.client.retries.run(
            call.send, limiter=call, estimated_tokens=first.estimated_tokens
        )
        return call.last.response_of(outcome)


class _RoutedCall:
    """One call; asking leave for a try chooses its endpoint, and asks that endpoint's limiter."""

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
        self._replica = owner.among[0]

    @property
    def last(self) -> PreparedCall:
        return self.prepared(self._replica)

    def prepared(self, replica: Replica) -> PreparedCall:
        if replica.url not in self._prepared:
            client = self._owner.clients[replica.url]
            self._prepared[replica.url] = client.prepare(self._messages, **self._options)
        return self._prepared[replica.url]

    async def acquire(self, estimated_tokens: int) -> CallLease:
        owner = self._owner
        self._replica = owner.kept = owner.replicas.choose(owner.among, owner.kept)
        self._replica.begin()
        limiter = self.last.client.limiter
        if limiter is None:
            return _NoLease()
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

    async def note_rate_limited(self, retry_after_s: float | None) -> None:
        limiter = self.last.client.limiter
        if limiter is not None:
            pending = limiter.note_rate_limited(retry_after_s)
            if pending is not None:
                await pending


class _NoLease:
    """Leave where nothing is limited."""

    def settle(self, actual_tokens: int, outcome: CallStatus) -> None:
        """Do nothing."""
