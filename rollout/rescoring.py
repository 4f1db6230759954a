"""Scores stored trajectories again: publishes requests and waits for their verdicts.

`rollout rescore` uses it. Workers score, and the collector stores their verdicts. Missing workers
and a missing collector are started here, until the command ends.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import typer
from rich.status import Status
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, InputError, WaitTimeout
from pipeline.contract.messages import RescoreRequest
from pipeline.contract.run import RunConfig, own_queue_of, rescore_queue_of
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher
from pipeline.rescorer import read_requests
from pipeline.store.engine import RESCORED_CHANNEL, Listener, transact
from pipeline.store.processes import list_processes
from pipeline.store.rescores import NAME_CHARS, Verdicts, count_rescorable, find_scored
from pipeline.store.runs import Run
from rollout.deployment import Deployment
from rollout.known_names import require_known
from rollout.options import WorkerOptions
from rollout.output import console, note
from rollout.supervision import LocalProcesses

_EXIT_INTERRUPTED = 130

#: Highest number of requests without a verdict; bounds the memory of the broker and this process.
_MOST_PENDING = 2000
_COLLECTOR_EVERY_S = 5.0
_LOOK_S = 0.5
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class RescoreJob:
    """The trajectories to score, the reward, and the request queue."""

    run: Run
    reward: str
    error_class: ErrorClass | None
    queue: str
    is_ours: bool  #: only workers of this command read the queue
    plugins: tuple[str, ...]  #: plug-ins of these workers
    total: int  #: number of trajectories


class Rescorer:
    """Scores trajectories of one store; close it, or use it as a context manager."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        settings = deployment.settings
        self._publisher = RequestPublisher(
            broker_of(settings), expires_s=settings.dispatch.request_expires_s
        )

    def __enter__(self) -> Rescorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()

    def plan(
        self,
        name: str,
        *,
        reward: str | None,
        error_class: ErrorClass | None,
        plugins: list[str] | None,
        may_start: bool,
    ) -> RescoreJob:
        """Choose the queue; check the reward's name unless other workers score by the run's own.

        Args:
            name: The run's name.
            reward: Registered name; None: the run's own reward.
            error_class: Select only rollouts that failed with this class.
            plugins: Plug-ins of the workers that are started here; None: the run's plug-ins.
            may_start: Whether workers may be started here.

        Raises:
            InputError: The run has no reward, or the checked name is not registered here.
        """
        run = self._deployment.find_run(name)
        reward = reward or run.config.reward
        if reward is None:
            raise InputError(
                f"Run {run.slug} has no reward.", remedy="Name one: --reward NAME", code="E105"
            )
        is_ours = may_start and (bool(plugins) or not self._is_read(run))
        known = plugins or run.origin.plugins or self._deployment.settings.worker.plugins
        is_own = reward == run.config.reward
        if is_ours or not is_own:
            config = run.config.reward_config if is_own else {}
            require_known(RunConfig(reward=reward, reward_config=config), plugins=known)
        total = self._deployment.transact(
            lambda connection: count_rescorable(connection, run, error_class=error_class)
        )
        queue = rescore_queue_of(run.slug) if is_ours else run.config.queue
        return RescoreJob(run, reward, error_class, queue, is_ours, tuple(known), total)

    def publish(self, job: RescoreJob) -> int:
        """Publish all requests without waiting; return their number."""
        count = 0
        for requests in self._requests(job):
            self._publisher.publish(requests, queue=job.queue)
            count += len(requests)
        return count

    def score(
        self, job: RescoreJob, waiting: RescoreWait, *, workers: int, each: int | None
    ) -> None:
        """Publish, wait for every verdict, and stop the processes that were started for it.

        Args:
            job: The trajectories, reward and queue.
            waiting: Counts the verdicts.
            workers: Number of workers to start if no worker reads the queue.
            each: Concurrent attempts per worker.
        """
        processes = LocalProcesses(self._deployment.settings)
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            if job.is_ours and job.total:
                note(f"A worker is started here; it reads the queue {job.queue}.")
                options = WorkerOptions(each, list(job.plugins))
                processes.start_workers(workers, options, queue=job.queue)
            with waiting.watched(_Watch(self._deployment, processes).check):
                for requests in self._requests(job):
                    waiting.expect(requests)
                    waiting.refuse(self._publisher.publish(requests, queue=job.queue))
                    waiting.wait(_MOST_PENDING)
                waiting.wait()
        except KeyboardInterrupt:
            # Do not wait for running requests: the next call requests their values again.
            processes.stop(at_once=True)
            note(
                f"Interrupted: {waiting}. These values are kept. "
                f"Ask for the rest: rollout rescore {job.run.slug} --reward {job.reward}"
            )
            raise typer.Exit(_EXIT_INTERRUPTED) from None
        finally:
            processes.stop()

    def _requests(self, job: RescoreJob) -> Iterator[list[RescoreRequest]]:
        deployment = self._deployment
        return read_requests(
            deployment.engine, deployment.settings, job.run, job.reward, job.error_class
        )

    def _is_read(self, run: Run) -> bool:
        readers = self._publisher.count_readers(run.config.queue)
        if readers is not None:
            return readers > 0
        # Workers on SQS cannot be queried, and workers of a local run ended with it.
        return run.config.queue != own_queue_of(run.slug) and _has(self._deployment, "worker")


class RescoreWait:
    """Counts verdicts until none is missing.

    The collector sends a notification for each commit. After a lost connection a query finds the
    rollouts that have a value.

    Args:
        engine: The trajectory store.
        job: The trajectories that are to be scored.
        timeout_s: Longest time without any verdict.
    """

    def __init__(self, engine: Engine, job: RescoreJob, *, timeout_s: float) -> None:
        self.total = job.total
        self.scored = 0
        self.failed = 0
        self.reason: str | None = None  #: error of the first failed request
        self._engine = engine
        self._reward = job.reward
        self._queue = job.queue
        self._timeout_s = timeout_s
        self._pending: set[UUID] = set()
        self._listener = Listener(engine, RESCORED_CHANNEL)
        self._check: Callable[[], None] = lambda: None
        self._news_at = self._line_at = time.monotonic()
        self._display: Status | None = None

    def __str__(self) -> str:
        return f"{self.scored} of {self.total} trajectories were scored"

    @contextmanager
    def watched(self, check: Callable[[], None]) -> Iterator[None]:
        """Listen for notifications and show progress in the block; publish only inside it.

        Args:
            check: Called about twice a second; raises if the wait has become useless.
        """
        self._check = check
        try:
            self._listener.hear(0)
            with ExitStack() as stack:
                if sys.stderr.isatty():
                    self._display = stack.enter_context(console(sys.stderr).status(str(self)))
                yield
        finally:
            self._display = None
            self._listener.close()

    def expect(self, requests: Iterable[RescoreRequest]) -> None:
        """Count verdicts on these requests from now on; called before they are published."""
        self._pending |= {request.rollout_id for request in requests}

    def refuse(self, requests: Iterable[RescoreRequest]) -> None:
        """Count requests that are too large for the broker as failed."""
        refused = [request.rollout_id for request in requests]
        self._take(Verdicts(self._reward[:NAME_CHARS], [], refused, "its prompt is too large"))

    def wait(self, most: int = 0) -> None:
        """Wait until at most `most` verdicts are missing.

        Raises:
            WaitTimeout: No verdict came for too long.
        """
        while len(self._pending) > most:
            payloads = self._listener.hear(_LOOK_S)
            if payloads is None:
                self._catch_up()
            for payload in payloads or ():
                self._take(Verdicts.read(payload))
            self._check()
            self._show()
            if self._is_over():
                self._catch_up()
            if self._is_over() and self._pending:
                raise self._timeout()

    def _take(self, verdicts: Verdicts) -> None:
        if verdicts.reward != self._reward[:NAME_CHARS]:
            return
        # Delivery is at least once: a repeated verdict is no longer pending.
        scored = self._pending.intersection(verdicts.scored)
        failed = self._pending.intersection(verdicts.failed)
        self._pending -= scored | failed
        self.scored += len(scored)
        self.failed += len(failed)
        if failed:
            self.reason = self.reason or verdicts.reason
        if scored or failed:
            self._news_at = time.monotonic()

    def _catch_up(self) -> None:
        found = transact(self._engine, lambda c: find_scored(c, self._pending, self._reward))
        self._take(Verdicts(self._reward[:NAME_CHARS], list(found), [], None))

    def _show(self) -> None:
        silent_s = time.monotonic() - self._news_at
        line = f"{self}, {self.failed} failed"
        if silent_s > _LINE_EVERY_S:
            line += (
                f"; no value for {silent_s:.0f} s. They come from the workers of the queue "
                f"{self._queue} through a controller's collector"
            )
        if self._display is not None:
            self._display.update(line)
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            note(f"{line}.")

    def _is_over(self) -> bool:
        return time.monotonic() - self._news_at >= self._timeout_s

    def _timeout(self) -> WaitTimeout:
        return WaitTimeout(
            f"No trajectory was scored for {self._timeout_s:g} s; {self}.",
            why=f"Does a worker with the reward {self._reward} read the queue {self._queue}, and "
            "does a controller run?",
            remedy="The values so far are kept. See `rollout ps`, and give the command again.",
        )


class _Watch:
    """Checks that the processes of this command run, and that there is a collector."""

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
            self._processes.start_controller(only="collector")
            self._is_collected = True


def _has(deployment: Deployment, kind: str) -> bool:
    seen = deployment.transact(list_processes)
    return any(each.kind == kind and not each.stopping for each in seen)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
