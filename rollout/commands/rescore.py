"""`rollout rescore`: have stored trajectories scored again, without running their agents.

Publishes requests and waits for the verdicts; workers score, and the collector stores what they
say. What is missing of workers and collectors is started here, until the command ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.contract.errors import InputError
from rollout.commands.runs import print_scores
from rollout.deployment import Deployment, opened
from rollout.local_processes import LocalProcesses
from rollout.options import DryRun, Json, RunName, WorkerOptions, takes
from rollout.output import note, print_json

if TYPE_CHECKING:
    from pipeline.contract.errors import ErrorClass
    from pipeline.contract.messages import RescoreRequest
    from pipeline.queue.requests import RequestPublisher
    from pipeline.store.runs import Run
    from rollout.rescore_wait import RescoreWait

#: Exit code when no trajectory could be scored.
_EXIT_ALL_FAILED = 4
_EXIT_INTERRUPTED = 130

#: Requests without a verdict at once: the broker and this process hold no more of a large run.
_MOST_PENDING = 2000
_COLLECTOR_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be scored, by what, and where the requests go."""

    run: Run
    reward: str
    error_class: ErrorClass | None
    queue: str
    is_ours: bool  #: the queue is read by workers of this command alone
    plugins: tuple[str, ...]  #: those of its workers


@takes(WorkerOptions, "local")
def rescore(
    ctx: typer.Context,
    run: RunName,
    local: WorkerOptions,
    reward: Annotated[
        str | None, typer.Option(help="Registered name of the reward (default: the run's own).")
    ] = None,
    error_class: Annotated[
        str | None,
        typer.Option("--class", metavar="CLASS", help="Only rollouts that failed with this class."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Workers to start where none reads the run's queue.")
    ] = 1,
    wait: Annotated[
        bool, typer.Option("--wait/--detach", help="Wait for the values, or only publish.")
    ] = True,
    wait_timeout_s: Annotated[
        float, typer.Option("--wait-timeout", min=0, help="Longest wait for a value, in seconds.")
    ] = 300.0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Score stored trajectories again, without their agents.

    A rollout that failed only in scoring becomes a succeeded one if it can be scored now. Where no
    worker reads the run's queue, and with --plugin, a worker is started here.
    """
    from pipeline.queue.broker import broker_of
    from pipeline.queue.requests import RequestPublisher
    from pipeline.store.rescores import count_rescorable
    from pipeline.store.runs import get_run
    from rollout.rescore_wait import RescoreWait

    wanted = _error_class(error_class)
    with opened(ctx, broker=True) as deployment:
        found = deployment.transact(lambda connection: get_run(connection, run))
        name = reward or found.config.reward
        if name is None:
            raise InputError(
                f"Run {found.slug} has no reward.", remedy="Name one: --reward NAME", code="E105"
            )
        settings = deployment.settings
        publisher = RequestPublisher(
            broker_of(settings), expires_s=settings.dispatch.request_expires_s
        )
        try:
            may_start = wait and workers > 0
            job = _job(deployment, publisher, found, name, wanted, local, may_start=may_start)
            total = deployment.transact(lambda c: count_rescorable(c, found, error_class=wanted))
            document = {"run": found.slug, "reward": name, "requested": total, "dry_run": dry_run}
            if dry_run or not wait:
                if not dry_run:
                    document["requested"] = _publish_all(deployment, publisher, job)
                _print_request(document, job, as_json=as_json)
                return
            waiting = RescoreWait(
                deployment.engine, name, total, queue=job.queue, timeout_s=wait_timeout_s
            )
            starts = workers if job.is_ours and total else 0
            options = WorkerOptions(local.concurrency, list(job.plugins))
            _score(deployment, publisher, job, waiting, options=options, workers=starts)
        finally:
            publisher.close()
        _print_end(deployment, job, document, waiting, as_json=as_json)
    if waiting.failed and not waiting.scored:
        raise typer.Exit(_EXIT_ALL_FAILED)


def _job(
    deployment: Deployment,
    publisher: RequestPublisher,
    run: Run,
    reward: str,
    error_class: ErrorClass | None,
    local: WorkerOptions,
    *,
    may_start: bool,
) -> _Job:
    """Choose the queue, and check the reward's name as far as it can be known here.

    Raises:
        InputError: No reward of this name is registered here, and no worker elsewhere is known to
            have it.
    """
    from pipeline.contract.run import RunConfig, rescore_queue_of
    from rollout.known_names import require_known

    is_ours = may_start and (bool(local.plugin) or not _is_read(deployment, publisher, run))
    plugins = local.plugin or run.origin.plugins or deployment.settings.worker.plugins
    is_own = reward == run.config.reward
    if is_ours or not is_own:
        config = run.config.reward_config if is_own else {}
        require_known(RunConfig(reward=reward, reward_config=config), plugins=plugins)
    queue = rescore_queue_of(run.slug) if is_ours else run.config.queue
    return _Job(run, reward, error_class, queue, is_ours, tuple(plugins))


def _is_read(deployment: Deployment, publisher: RequestPublisher, run: Run) -> bool:
    from pipeline.contract.run import own_queue_of

    readers = publisher.count_readers(run.config.queue)
    if readers is not None:
        return readers > 0
    # Workers on SQS cannot be asked; those of a local run ended with it.
    return run.config.queue != own_queue_of(run.slug) and _has(deployment, "worker")


def _has(deployment: Deployment, kind: str) -> bool:
    from pipeline.store.processes import list_processes

    seen = deployment.transact(list_processes)
    return any(each.kind == kind and not each.stopping for each in seen)


def _requests(deployment: Deployment, job: _Job) -> Iterator[list[RescoreRequest]]:
    from rollout.rescore_requests import read_requests

    return read_requests(deployment, job.run, job.reward, job.error_class)


def _publish_all(deployment: Deployment, publisher: RequestPublisher, job: _Job) -> int:
    count = 0
    for requests in _requests(deployment, job):
        publisher.publish_rescores(requests, queue=job.queue)
        count += len(requests)
    return count


def _score(
    deployment: Deployment,
    publisher: RequestPublisher,
    job: _Job,
    waiting: RescoreWait,
    *,
    options: WorkerOptions,
    workers: int,
) -> None:
    """Publish, wait for every verdict, and stop what was started for it."""
    processes = LocalProcesses(deployment.settings)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if workers:
            note(f"A worker is started here; it reads the queue {job.queue}.")
            processes.start_workers(workers, options, queue=job.queue)
        with waiting.watched(_Watch(deployment, processes).check):
            for requests in _requests(deployment, job):
                waiting.expect(requests)
                waiting.refuse(publisher.publish_rescores(requests, queue=job.queue))
                waiting.wait(_MOST_PENDING)
            waiting.wait()
    except KeyboardInterrupt:
        # A value that is under way is not worth a wait: it is asked for again.
        processes.stop(at_once=True)
        note(
            f"Interrupted: {waiting}. These values are kept. "
            f"Ask for the rest: rollout rescore {job.run.slug} --reward {job.reward}"
        )
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    finally:
        processes.stop()


class _Watch:
    """Looks after the processes of a wait: ours must live, and a collector must be there."""

    def __init__(self, deployment: Deployment, processes: LocalProcesses) -> None:
        self._deployment = deployment
        self._processes = processes
        self._is_collected = False
        self._look_at = 0.0

    def check(self) -> None:
        self._processes.check()
        if self._is_collected or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _COLLECTOR_EVERY_S
        if not _has(self._deployment, "collector"):
            self._processes.start_collector()
            self._is_collected = True


def _print_request(document: dict[str, Any], job: _Job, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    verb = "would be" if document["dry_run"] else "are to be"
    print(
        f"{document['requested']} trajectories of run {job.run.slug} {verb} scored by {job.reward}."
    )
    if not document["dry_run"]:
        note(f"Workers of the queue {job.queue} score them: rollout worker --queues {job.queue}")


def _print_end(
    deployment: Deployment,
    job: _Job,
    document: dict[str, Any],
    ended: RescoreWait,
    *,
    as_json: bool,
) -> None:
    from pipeline.store.status import run_status

    status = deployment.transact(lambda connection: run_status(connection, job.run))
    scores = [
        score
        for score in status.scores
        if score.name == job.reward or score.name.startswith(f"{job.reward}.")
    ]
    if as_json:
        means = [{"name": s.name, "version": s.version, "n": s.n, "mean": s.mean} for s in scores]
        counts = {"requested": ended.total, "scored": ended.scored, "failed": ended.failed}
        print_json(document | counts | {"scores": means})
    else:
        print(f"{ended} by {job.reward}.")
        print_scores(scores)
    if ended.failed:
        note(f"{ended.failed} could not be scored. The first of them: {ended.reason}")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _error_class(name: str | None) -> ErrorClass | None:
    from pipeline.contract.errors import ErrorClass

    if name is None:
        return None
    if name not in list(ErrorClass):
        raise InputError(
            f"There is no error class {name!r}.", remedy=f"Known: {', '.join(ErrorClass)}."
        )
    return ErrorClass(name)
