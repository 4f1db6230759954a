"""A stored trajectory scored again, without its agent.

Called by the Celery task `rollout.rescore`. What goes wrong becomes part of the completion, as in
`execution.py`. Must not: know Celery.
"""

from __future__ import annotations

import asyncio
import base64

from pipeline.contract.errors import (
    MalformedMessage,
    RewardError,
    RolloutError,
    ServiceUnavailable,
)
from pipeline.contract.messages import Completion, ErrorRecord, RescoreRequest, storable
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.payloads import PayloadStore, load_body
from pipeline.redaction import NOTHING, Redactor
from workers.core.trajectory import Trajectory
from workers.process.records import stop_reason_of, trajectory_of
from workers.process.scoring import Scorer


async def rescore(
    request: RescoreRequest,
    payloads: PayloadStore,
    worker_id: str,
    *,
    redactor: Redactor = NOTHING,
) -> Completion:
    """Score a stored trajectory; a failure is an outcome too."""
    scorer = Scorer(request.reward, request.reward_config, request.reward_timeout_s)
    completion = Completion(
        run_id=request.run_id,
        group_id=request.group_id,
        rollout_id=request.rollout_id,
        attempt_no=request.attempt_no,
        label=request.label,
        worker_id=worker_id,
        purpose="rescore",
        outcome="succeeded",
    )
    try:
        trajectory = await _load(request, payloads)
        value, parts = await scorer.score(trajectory, request.prompt)
    except RolloutError as error:
        record = ErrorRecord(
            error_class=error.error_class,
            code=error.code,
            message=storable(redactor.text(str(error))),
            phase="scoring",
        )
        said = {
            "outcome": "failed",
            "error": record,
            "reward_parts": (scorer.failed(error.error_class),),
        }
        return completion.model_copy(update=said)
    said = {"reward": value, "reward_parts": parts, "stop_reason": stop_reason_of(trajectory)}
    return completion.model_copy(update=said)


async def _load(request: RescoreRequest, payloads: PayloadStore) -> Trajectory:
    try:
        if request.body_uri is not None:
            body = await asyncio.to_thread(load_body, request.body_uri, payloads)
        else:
            body = base64.b64decode(request.body)
        return trajectory_of(unpack_record(body, request.codec), request.label)
    except (MalformedMessage, ServiceUnavailable, ValueError, KeyError, TypeError) as error:
        raise RewardError(
            f"The stored trajectory cannot be read: {error}", code="no_trajectory"
        ) from error
