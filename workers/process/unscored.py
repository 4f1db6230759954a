"""The trajectory that a remote session left, taken over by the attempt that scores it.

Called by `execute` in the place of the agent (docs/adr/0045). Must not: score.
"""

from __future__ import annotations

import asyncio
import base64

from pipeline.contract.errors import (
    ContractError,
    MalformedMessage,
    RewardError,
    SandboxError,
    ServiceUnavailable,
    UnreadableBody,
    boundary,
)
from pipeline.contract.messages import Completion
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.claim_checks import load_body, require_digest
from pipeline.queue.frames import decode_completions
from pipeline.queue.payloads import open_payloads
from pipeline.settings import Settings
from workers.process.attempt import Attempt
from workers.process.records import trajectory_of


async def take_over(attempt: Attempt, settings: Settings) -> None:
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
    try:
        body = await asyncio.to_thread(_body_of, unscored, settings)
        trajectory = trajectory_of(unpack_record(body, unscored.codec), attempt.request.label)
    except ServiceUnavailable as error:
        raise SandboxError(str(error), code="payload_store") from error
    except (UnreadableBody, MalformedMessage, ValueError, KeyError, TypeError) as error:
        why = f"The session's trajectory cannot be read: {error}"
        raise RewardError(why, code="no_trajectory") from error
    attempt.take_over(unscored, trajectory)


def _body_of(unscored: Completion, settings: Settings) -> bytes:
    if unscored.body_uri is not None:
        return load_body(unscored.body_uri, unscored.body_digest, open_payloads(settings))
    return require_digest(unscored.body, unscored.body_digest, of=unscored.label)
