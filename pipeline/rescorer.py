"""Requested rescores are claimed and published, row first, like attempts.

Used by the dispatcher, and by `rollout rescore`, which thereby needs no dispatcher. A request that
was lost is claimed again when its lease ends. Must not: score, or wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

from sqlalchemy import Connection, Engine

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import RescoreRequest
from pipeline.queue.broker import broker_of
from pipeline.queue.claim_checks import INLINE_BYTES
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.queue.requests import RequestPublisher
from pipeline.requests import rescore_request_of
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.rescore_requests import (
    ClaimedRescore,
    claim_rescores,
    fail_rescores,
    release_rescores,
)
from pipeline.store.runs import ids_of

log = logging.getLogger(__name__)

#: Trajectories read and published at once.
_CHUNK = 100
#: Highest number of requests without a verdict; bounds the memory of the broker.
_MOST_IN_FLIGHT = 2000


class RescoreDispatcher:
    """Publishes requested rescores, in the steps of its caller."""

    def __init__(self, engine: Engine, publisher: RequestPublisher, settings: Settings) -> None:
        self._engine = engine
        self._publisher = publisher
        self._settings = settings
        # A worker may have a request for this long, and no heartbeat names it.
        self._lease_s = settings.dispatch.request_expires_s + settings.lease.lease_s
        self._payloads: PayloadStore | None = None

    def step(self) -> int:
        """Publish some of the requests that are due; return how many.

        Raises:
            QueueUnavailable: The broker does not answer; these requests are due again at once.
        """
        claimed = transact(self._engine, self._claim)
        try:
            for queue in {each.queue for each in claimed}:
                self._publish([each for each in claimed if each.queue == queue], queue)
        except QueueUnavailable:
            transact(self._engine, release_rescores, claimed)
            raise
        return len(claimed)

    def _claim(self, connection: Connection) -> list[ClaimedRescore]:
        names = self._settings.dispatch.runs
        return claim_rescores(
            connection,
            only=ids_of(connection, names) if names else None,
            most=_CHUNK,
            most_in_flight=_MOST_IN_FLIGHT,
            lease_s=self._lease_s,
        )

    def _publish(self, claimed: Sequence[ClaimedRescore], queue: str) -> None:
        requests = [self._request(each) for each in claimed]
        too_large = {each.task_id for each in self._publisher.publish(requests, queue=queue)}
        refused = [
            each
            for each, request in zip(claimed, requests, strict=True)
            if request.task_id in too_large
        ]
        if refused:
            transact(self._engine, fail_rescores, refused, reason="its prompt is too large")

    @cached_property
    def _inline_bytes(self) -> int:
        return broker_of(self._settings).inline_bytes(INLINE_BYTES)

    def _request(self, each: ClaimedRescore) -> RescoreRequest:
        self._payloads = self._payloads or open_payloads(self._settings)
        return rescore_request_of(
            each.run, each.trajectory, each.reward, self._payloads, inline_bytes=self._inline_bytes
        )
