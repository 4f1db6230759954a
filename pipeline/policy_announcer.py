"""The announcer: tells running workers which policies are published.

Used by the dispatcher. A new publication is announced at once. All publications are announced again
every few seconds, for workers that missed one. On a broker without remote control, workers learn of
it from their requests. Must not: decide what is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from pipeline.contract.errors import QueueUnavailable
from pipeline.queue.requests import RequestPublisher
from pipeline.store.engine import transact
from pipeline.store.policies import policies_in_use

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_REPEAT_EVERY_S = 10.0


class PolicyAnnouncer:
    """Announces the policies of runs with attempts in flight."""

    def __init__(
        self,
        engine: Engine,
        publisher: RequestPublisher,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._clock = clock
        self._looked_at = self._repeated_at = -_REPEAT_EVERY_S
        self._announced: dict[UUID, int] = {}

    def step(self) -> None:
        """Announce new publications, and all of them again after a while."""
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        in_use = transact(self._engine, policies_in_use)
        new = [each for each in in_use if self._announced.get(each.run_id) != each.serial]
        if now - self._repeated_at >= _REPEAT_EVERY_S:
            self._repeated_at, new = now, in_use
        try:
            self._publisher.announce_policies(new)
        except QueueUnavailable as error:
            log.warning("Workers were not told of %d published policies: %s", len(new), error)
            return
        self._announced = {each.run_id: each.serial for each in in_use}
