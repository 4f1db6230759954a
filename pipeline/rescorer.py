"""Requests to score stored trajectories again, built from rows of the store.

Used by `rollout rescore`. Bodies too large for a message go through the payload store. Must not:
publish, or wait.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import Completion, RescoreRequest
from pipeline.queue.broker import broker_of
from pipeline.queue.frames import encode_completions
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.rescores import StoredTrajectory, read_rescorable
from pipeline.store.runs import Run

#: Trajectories read and published at once.
_CHUNK = 100
#: Larger bodies go through the payload store, because brokers are made for small messages.
_INLINE_BYTES = 96 * 1024


def read_requests(
    engine: Engine, settings: Settings, run: Run, reward: str, error_class: ErrorClass | None
) -> Iterator[list[RescoreRequest]]:
    """Yield the requests for a run's trajectories, a chunk at a time.

    Args:
        engine: The trajectory store.
        settings: Name the broker and the payload store.
        run: The run of the trajectories.
        reward: Name of the reward that scores them.
        error_class: Only rollouts that failed with this class.
    """
    payloads = open_payloads(settings)
    inline = 0 if broker_of(settings).kind == "sqs" else _INLINE_BYTES
    after = None
    while chunk := transact(
        engine,
        lambda connection, after=after: read_rescorable(
            connection, run, error_class=error_class, after=after, most=_CHUNK
        ),
    ):
        yield [request_of(run, stored, reward, payloads, inline_bytes=inline) for stored in chunk]
        after = chunk[-1].rollout_id


def request_of(
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
