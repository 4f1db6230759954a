"""`rollout rescore`: have stored trajectories scored again, without running their agents.

Publishes requests; workers score, and the collector stores what they say.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.deployment import Deployment, opened
from pipeline.cli.options import DryRun, Json, RunName
from pipeline.cli.output import print_json
from pipeline.contract.errors import InputError

if TYPE_CHECKING:
    from pipeline.contract.errors import ErrorClass
    from pipeline.contract.messages import RescoreRequest
    from pipeline.queue.payloads import PayloadStore
    from pipeline.store.rescores import StoredTrajectory
    from pipeline.store.runs import Run

#: Trajectories read and published at once.
_CHUNK = 100
#: Larger ones go through the payload store: brokers do not like large messages.
_INLINE_BYTES = 96 * 1024


def rescore(
    ctx: typer.Context,
    run: RunName,
    reward: Annotated[
        str | None, typer.Option(help="Registered name of the reward (default: the run's own).")
    ] = None,
    error_class: Annotated[
        str | None,
        typer.Option("--class", metavar="CLASS", help="Only rollouts that failed with this class."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Score stored trajectories again, without their agents.

    A rollout that failed only in scoring becomes a succeeded one if it can be scored now.
    """
    from pipeline.store.rescores import count_rescorable
    from pipeline.store.runs import get_run

    wanted = _error_class(error_class)
    with opened(ctx, broker=True) as deployment:
        found = deployment.transact(lambda connection: get_run(connection, run))
        name = reward or found.config.reward
        if name is None:
            raise InputError(
                f"Run {found.slug} has no reward.", remedy="Name one: --reward NAME", code="E105"
            )
        if dry_run:
            count = deployment.transact(
                lambda connection: count_rescorable(connection, found, error_class=wanted)
            )
        else:
            count = publish(deployment, found, name, wanted)
    if as_json:
        print_json({"run": found.slug, "reward": name, "requested": count, "dry_run": dry_run})
    else:
        verb = "would be" if dry_run else "are being"
        print(f"{count} trajectories of run {found.slug} {verb} scored by {name}.")


def publish(deployment: Deployment, run: Run, reward: str, error_class: ErrorClass | None) -> int:
    """Ask workers to score a run's trajectories; return how many."""
    from pipeline.queue.broker import broker_of
    from pipeline.queue.payloads import open_payloads
    from pipeline.queue.requests import RequestPublisher

    settings = deployment.settings
    broker = broker_of(settings)
    payloads = open_payloads(settings)
    inline = 0 if broker.kind == "sqs" else _INLINE_BYTES
    publisher = RequestPublisher(broker, expires_s=settings.dispatch.request_expires_s)
    count = 0
    try:
        for chunk in _chunks(deployment, run, error_class):
            requests = [
                request_of(run, stored, reward, payloads, inline_bytes=inline) for stored in chunk
            ]
            publisher.publish_rescores(requests, queue=run.config.queue)
            count += len(requests)
    finally:
        publisher.close()
    return count


def request_of(
    run: Run, stored: StoredTrajectory, reward: str, payloads: PayloadStore, *, inline_bytes: int
) -> RescoreRequest:
    """Return the message that asks a worker to score a trajectory."""
    from pipeline.contract.messages import RescoreRequest

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
    )


def _check_out(run: Run, stored: StoredTrajectory, payloads: PayloadStore) -> str:
    from pipeline.contract.messages import Completion
    from pipeline.queue.frames import encode_completions

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
    )
    # Not the attempt's own key: there the reconciler looks for outcomes whose message was lost.
    return payloads.put(f"{run.run_id}/{stored.label}.rescore", encode_completions([completion]))


def _chunks(
    deployment: Deployment, run: Run, error_class: ErrorClass | None
) -> Iterator[list[StoredTrajectory]]:
    from pipeline.store.rescores import read_rescorable

    after = None
    while chunk := deployment.transact(
        lambda connection, after=after: read_rescorable(
            connection, run, error_class=error_class, after=after, most=_CHUNK
        )
    ):
        yield chunk
        after = chunk[-1].rollout_id


def _error_class(name: str | None) -> ErrorClass | None:
    from pipeline.contract.errors import ErrorClass

    if name is None:
        return None
    if name not in list(ErrorClass):
        raise InputError(
            f"There is no error class {name!r}.", remedy=f"Known: {', '.join(ErrorClass)}."
        )
    return ErrorClass(name)
