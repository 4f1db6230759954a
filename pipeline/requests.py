"""Requests to workers, built from rows of the store: for attempts and for rescores.

Used by the dispatcher. Bodies too large for a message go through the payload store. Must not:
publish.
"""

from __future__ import annotations

import base64

from pipeline.contract.errors import SCORED_BY_DEFAULT, Action, ErrorClass
from pipeline.contract.messages import Completion, RescoreRequest, RolloutRequest
from pipeline.contract.rollout import label_of
from pipeline.contract.run import AttemptSpec
from pipeline.queue.frames import encode_completions
from pipeline.queue.payloads import PayloadStore
from pipeline.store.rescorable import StoredTrajectory
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.store.runs import Run


def request_of(run: Run, attempt: ClaimedAttempt) -> RolloutRequest:
    """Return the message that asks a worker to run an attempt."""
    config, policy = run.config, run.policy
    spec = {name: getattr(config, name) for name in AttemptSpec.model_fields}
    if policy is not None and policy.endpoints:
        spec["base_url"] = policy.endpoints
    return RolloutRequest(
        run=run.slug,
        run_id=run.run_id,
        group_id=attempt.group_id,
        group_no=attempt.group_no,
        rollout_id=attempt.rollout_id,
        rollout_index=attempt.rollout_index,
        n=attempt.n,
        attempt_no=attempt.attempt_no,
        label=label_of(run.slug, attempt.group_no, attempt.rollout_index, attempt.attempt_no),
        prompt=attempt.payload,
        **spec,
        scored=tuple(
            error_class
            for error_class in SCORED_BY_DEFAULT
            if config.on_error.get(error_class, Action.SCORE) is Action.SCORE
        ),
        # The model reads a tool's failure, unless the run names another action for it.
        strict_tools=ErrorClass.TOOL_ERROR in config.on_error,
        policy_version=run.policy_version,
        policy=policy,
        weight=config.weight,
        lost_count=attempt.lost_count,
        unscored_no=attempt.unscored_no,
        max_staleness=config.max_staleness,
    )


def rescore_request_of(
    run: Run, stored: StoredTrajectory, reward: str, payloads: PayloadStore, *, inline_bytes: int
) -> RescoreRequest:
    """Return the message that asks a worker to score a trajectory."""
    body, uri = stored.body or b"", stored.body_uri
    if uri is None and len(body) > inline_bytes:
        uri, body = _check_out(run, stored, payloads), b""
    return RescoreRequest(
        run=run.slug,
        run_id=run.run_id,
        group_id=stored.group_id,
        group_no=stored.group_no,
        rollout_id=stored.rollout_id,
        rollout_index=stored.rollout_index,
        n=stored.n,
        attempt_no=stored.attempt_no,
        label=stored.label,
        prompt=stored.prompt,
        reward=reward,
        reward_config=run.config.reward_config if reward == run.config.reward else {},
        reward_timeout_s=run.config.limits.reward_timeout_s,
        codec=stored.codec,
        body="" if uri else base64.b64encode(body).decode(),
        body_uri=uri,
        body_digest=stored.body_digest,
    )


def _check_out(run: Run, stored: StoredTrajectory, payloads: PayloadStore) -> str:
    completion = Completion(
        run_id=run.run_id,
        group_id=stored.group_id,
        rollout_id=stored.rollout_id,
        attempt_no=stored.attempt_no,
        label=stored.label,
        worker_id="",
        outcome="succeeded",
        codec=stored.codec,
        body=stored.body or b"",
        body_digest=stored.body_digest,
    )
    # A key of its own: under the attempt's key the reconciler looks for outcomes of lost messages.
    return payloads.put(f"{run.run_id}/{stored.label}.rescore", encode_completions([completion]))
