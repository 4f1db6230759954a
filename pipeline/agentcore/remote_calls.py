"""The calls of a remote attempt, read from the journal frames that gateways sent.

Used by the results service. The calls of a frame that cannot be read are missing, and so are calls
that continue them; the result has their number. Must not: know the store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipeline.contract.errors import MalformedMessage, UnreadableBody
from pipeline.contract.journal import read_calls
from pipeline.contract.messages import JournalFrame
from pipeline.queue.journal_frames import body_of_frame
from pipeline.queue.payloads import PayloadStore
from pipeline.tokens.recorded_calls import RemoteCalls, remote_calls_of

log = logging.getLogger(__name__)


def read_remote_calls(frames: Sequence[JournalFrame], store: PayloadStore) -> RemoteCalls:
    """Return the calls of one attempt.

    Args:
        frames: All of the attempt, in the order of their first calls.
        store: Large bodies are there.

    Raises:
        ServiceUnavailable: The payload store does not answer.
    """
    n_calls = sum(frame.n_calls for frame in frames)
    bodies: list[bytes] = []
    for frame in frames:
        try:
            bodies.append(body_of_frame(frame, store))
        except UnreadableBody as error:
            log.warning("Calls of %s are missing in its trajectory. %s", frame.label, error)
    try:
        calls = read_calls(bodies)
        return remote_calls_of(calls, missing=n_calls - len(calls))
    except MalformedMessage as error:
        log.warning("The calls of %s are missing in its trajectory. %s", frames[0].label, error)
        return RemoteCalls(missing=n_calls)
