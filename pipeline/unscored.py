"""Requests of attempts that score the trajectory of a remote session carry that trajectory.

Used by the dispatcher between its commit and the publication (docs/adr/0045). Large bodies go
through the payload store. Must not: publish, or unpack a trajectory.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from sqlalchemy import Engine

from pipeline.contract.messages import Completion, RolloutRequest
from pipeline.queue.broker import broker_of
from pipeline.queue.claim_checks import INLINE_BYTES, check_out
from pipeline.queue.frames import encode_completions
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.unscored import read_unscored


class UnscoredResults:
    """Adds unscored trajectories to requests.

    Args:
        engine: The store.
        settings: The payload store, and the broker's kind.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._payloads: PayloadStore | None = None

    def attach(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests, those that only score with what they score.

        A request is left out whose rollout got its reward from an earlier attempt meanwhile.

        Raises:
            ServiceUnavailable: The payload store does not answer.
        """
        if not any(request.unscored_no for request in requests):
            return list(requests)
        attached = [self._with_trajectory(request) for request in requests]
        return [request for request in attached if request is not None]

    def _with_trajectory(self, request: RolloutRequest) -> RolloutRequest | None:
        if request.unscored_no is None:
            return request
        # One at a time: the trajectories of a whole batch may not fit into the memory.
        key = request.rollout_id, request.unscored_no
        found = transact(self._engine, read_unscored, [key]).get(key)
        if found is None:
            return None
        frame = encode_completions([self._light(found)])
        return request.model_copy(update={"unscored": base64.b64encode(frame).decode()})

    def _light(self, completion: Completion) -> Completion:
        inline_bytes = broker_of(self._settings).inline_bytes(INLINE_BYTES)
        if len(completion.body) + len(completion.tokens) <= inline_bytes or not completion.body:
            return completion
        self._payloads = self._payloads or open_payloads(self._settings)
        return check_out(completion, self._payloads)
