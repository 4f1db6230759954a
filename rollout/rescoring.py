"""Scores stored trajectories again: asks for them in the store and waits for the verdicts.

`rollout rescore` uses it. Workers score, and the collector stores their verdicts. Missing workers
and a missing collector are started here, until the command ends.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import typer
from rich.status import Status
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, InputError, WaitTimeout
from pipeline.contract.run import RunConfig, own_queue_of, rescore_queue_of
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher
from pipeline.rescorer import RescoreDispatcher
from pipeline.store.engine import RESCORED_CHANNEL, Listener, transact
from pipeline.store.processes import list_processes
from pipeline.store.rescorable import count_rescorable
from pipeline.store.rescore_requests import count_rescores, end_rescores, request_rescores
from pipeline.store.runs import Run
from rollout.deployment import Deployment
from rollout.known_names import require_known
from rollout.options import WorkerOptions
from rollout.output import console, note
from rollout.supervision import LocalProcesses

_EXIT_INTERRUPTED = 130

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
        total = self._deployment.transact(count_rescorable, run, error_class=error_class)
        queue = rescore_queue_of(run.slug) if is_ours else run.config.queue
        return RescoreJob(run, reward, error_class, queue, is_ours, tuple(known), total)

    def request(self, job: RescoreJob, *, awaited: bool) -> int:
        """Ask for the scores in the store; return how many. A dispatcher publishes the requests."""
        return self._deployment.transact(
            request_rescores,
            job.run,
            job.reward,
            error_class=job.error_class,
            queue=job.queue,
            awaited=awaited,
        )

    def score(
        self, job: RescoreJob, waiting: RescoreWait, *, workers: int, each: int | None
    ) -> None:
        """Ask, wait for every verdict, and stop the processes that were started for it.

        Args:
            job: The trajectories, reward and queue.
            waiting: Counts the verdicts.
            workers: Number of workers to start if no worker reads the queue.
            each: Concurrent attempts per worker.
        """
        deployment = self._deployment
        processes = LocalProcesses(deployment.settings)
        # Where no dispatcher runs, the requests are published here.
        dispatcher = RescoreDispatcher(deployment.engine, self._publisher, deployment.settings)
        watch = _Watch(deployment, processes)
        signal.signal(signal.SIGTERM, _interrupt)
        keep_open = False
        try:
            if job.is_ours and job.total:
                note(f"A worker is started here; it reads the queue {job.queue}.")
                options = WorkerOptions(each, list(job.plugins))
                processes.start_workers(workers, options, queue=job.queue)
            self.request(job, awaited=True)
            waiting.wait(dispatcher.step, watch.check)
        except KeyboardInterrupt:
            # Do not wait for running requests: the next call requests their values again.
            processes.stop(at_once=True)
            # Nobody else reads a queue of this command.
            keep_open = not job.is_ours
            rest = "The rest is scored by the run's workers" if keep_open else "Ask for the rest"
            note(
                f"Interrupted: {waiting}. These values are kept. "
                f"{rest}: rollout rescore {job.run.slug} --reward {job.reward}"
            )
            raise typer.Exit(_EXIT_INTERRUPTED) from None
        finally:
            deployment.transact(end_rescores, job.run, job.reward, keep_open=keep_open)
            processes.stop()

    def _is_read(self, run: Run) -> bool:
        readers = self._publisher.count_readers(run.config.queue)
        if readers is not None:
            return readers > 0
        # Workers on SQS cannot be queried, and workers of a local run ended with it.
        return run.config.queue != own_queue_of(run.slug) and _has(self._deployment, "worker")


class RescoreWait:
    """Waits until no verdict is missing; the store holds them.

    Args:
        engine: The trajectory store.
        job: The trajectories that are to be scored.
        timeout_s: Longest time without any verdict.
    """

    def __init__(self, engine: Engine, job: RescoreJob, *, timeout_s: float) -> None:
        self.total = job.total
        self.scored = 0
        self.failed = 0
        self.reason: str | None = None  #: error of one of the failed requests
        self._engine = engine
        self._job = job
        self._timeout_s = timeout_s
        self._news_at = self._line_at = time.monotonic()
        self._display: Status | None = None

    def __str__(self) -> str:
        return f"{self.scored} of {self.total} trajectories were scored"

    def wait(self, publish: Callable[[], int], check: Callable[[], None]) -> None:
        """Wait until no verdict is missing, and show progress.

        Args:
            publish: Publishes some requests that are due; returns how many.
            check: Called about twice a second; raises if the wait has become useless.

        Raises:
            WaitTimeout: No verdict came for too long.
        """
        listener = Listener(self._engine, RESCORED_CHANNEL)
        try:
            with ExitStack() as stack:
                if sys.stderr.isatty():
                    self._display = stack.enter_context(console(sys.stderr).status(str(self)))
                while self._look():
                    if not publish():
                        listener.wait(_LOOK_S)
                    check()
                    self._show()
                    if time.monotonic() - self._news_at >= self._timeout_s and self._look():
                        raise self._timeout()
        finally:
            self._display = None
            listener.close()

    def _look(self) -> int:
        """Read how many verdicts there are; return how many are missing."""
        job = self._job
        count = transact(self._engine, count_rescores, job.run, job.reward)
        if count.scored + count.failed > self.scored + self.failed:
            self._news_at = time.monotonic()
        self.scored, self.failed, self.reason = count.scored, count.failed, count.reason
        self.total = self.scored + self.failed + count.waiting
        return count.waiting

    def _show(self) -> None:
        silent_s = time.monotonic() - self._news_at
        line = f"{self}, {self.failed} failed"
        if silent_s > _LINE_EVERY_S:
            line += (
                f"; no value for {silent_s:.0f} s. They come from the workers of the queue "
                f"{self._job.queue} through a controller's collector"
            )
        if self._display is not None:
            self._display.update(line)
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            note(f"{line}.")

    def _timeout(self) -> WaitTimeout:
        job = self._job
        return WaitTimeout(
            f"No trajectory was scored for {self._timeout_s:g} s; {self}.",
            why=f"Does a worker with the reward {job.reward} read the queue {job.queue}, and "
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
