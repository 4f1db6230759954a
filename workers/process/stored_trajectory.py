"""Trajectories that earlier attempts left: read to be scored, without running their agent.

Used by `execute` for a remote session's trajectory (docs/adr/0045), and by `scoring.py` for a
rescore. Must not: score.
"""

from __future__ import annotations

import asyncio
import base64

from pipeline.contract.errors import (
    ContractError,
    RewardError,
    SandboxError,
    ServiceUnavailable,
    boundary,
)
from pipeline.contract.messages import Completion, RescoreRequest
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.claim_checks import load_body, require_digest
from pipeline.queue.frames import decode_completions
from pipeline.queue.payloads import PayloadStore
from workers.core.trajectory import Trajectory
from workers.process.attempt import Attempt
from workers.process.records import trajectory_of


async def read_trajectory(
    stored: Completion | RescoreRequest, payloads: PayloadStore, *, label: str
) -> Trajectory:
    """Return a stored trajectory.

    Args:
        stored: The message with the trajectory, or with its place in the payload store.
        payloads: The payload store.
        label: Name of the attempt that scores the trajectory.

    Raises:
        UnreadableBody: The trajectory is gone or damaged.
        MalformedMessage: The trajectory cannot be decoded.
        ServiceUnavailable: The payload store does not answer.
    """
    if stored.body_uri is not None:
        body = await asyncio.to_thread(load_body, stored.body_uri, stored.body_digest, payloads)
    else:
        body = stored.body if isinstance(stored.body, bytes) else base64.b64decode(stored.body)
        require_digest(body, stored.body_digest, of=stored.label)
    return trajectory_of(unpack_record(body, stored.codec), label)


async def take_over(attempt: Attempt, payloads: PayloadStore) -> None:
    """Give the attempt the trajectory of its request.

    Raises:
        ContractError: The request holds no trajectory.
        RewardError: The trajectory is gone or damaged.
        SandboxError: The payload store does not answer.
    """
    attempt.enter("scoring")
    with boundary(ContractError, "no_trajectory"):
        (unscored,), _ = decode_completions(base64.b64decode(attempt.request.unscored))
    # Kept before the body is read: if that fails, the attempt still names it.
    attempt.take_over(unscored, attempt.trajectory)
    with boundary(RewardError, "no_trajectory"):
        try:
            trajectory = await read_trajectory(unscored, payloads, label=attempt.request.label)
        except ServiceUnavailable as error:
            raise SandboxError(str(error), code="payload_store") from error
    attempt.take_over(unscored, trajectory)
