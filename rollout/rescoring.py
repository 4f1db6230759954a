"""Scores stored trajectories again: requests their scores in the store and waits for the verdicts.

`rollout rescore` uses it. Workers score, and the collector stores their verdicts. Missing workers
and a missing collector are started here, until the command ends.
"""

from __future__ import annotations

import time
from signal import SIGTERM

import typer

from pipeline.contract.errors import ErrorClass, InputError
from pipeline.contract.run import RunConfig, own_queue_of, rescore_queue_of
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher
from pipeline.rescorer import RescoreDispatcher
from pipeline.store.processes import list_processes
from pipeline.store.rescorable import count_rescorable
from pipeline.store.rescore_requests import end_rescores, request_rescores
from pipeline.store.runs import Run
from rollout.deployment import Deployment
from rollout.known_names import require_known
from rollout.options import WorkerOptions
from rollout.output import note
from rollout.rescore_wait import RescoreJob, RescoreWait
from rollout.signals import EXIT_INTERRUPTED, interrupt_on
from rollout.supervision import LocalProcesses

_COLLECTOR_EVERY_S = 5.0


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
        is_ours = may_start and (bool(plugins) or not self._has_workers(run))
        known = plugins or run.origin.plugins or self._deployment.settings.worker.plugins
        is_own = reward == run.config.reward
        if is_ours or not is_own:
            config = run.config.reward_config if is_own else {}
            require_known(RunConfig(reward=reward, reward_config=config), plugins=known)
        total = self._deployment.transact(count_rescorable, run, error_class=error_class)
        queue = rescore_queue_of(run.slug) if is_ours else run.config.queue
        return RescoreJob(run, reward, error_class, queue, is_ours, tuple(known), total)

    def request(self, job: RescoreJob, *, awaited: bool) -> int:
        """Request the scores in the store; return how many. A dispatcher publishes the requests."""
        return self._deployment.transact(
            request_rescores,
            job.run,
            job.reward,
            error_class=job.error_class,
            queue=job.queue,
            awaited=awaited,
        )

    def score(
        self, job: RescoreJob, *, workers: int, concurrency: int | None, timeout_s: float
    ) -> RescoreWait:
        """Request the scores, wait for every verdict, and stop the processes that were started.

        Args:
            job: The trajectories, reward and queue.
            workers: Number of workers to start if no worker reads the queue.
            concurrency: Concurrent attempts per worker; None: as in the settings.
            timeout_s: Longest time without any verdict.

        Returns:
            The numbers of verdicts.

        Raises:
            WaitTimeout: No verdict came for too long.
        """
        deployment = self._deployment
        waiting = RescoreWait(deployment.engine, job, timeout_s=timeout_s)
        processes = LocalProcesses(deployment.settings)
        # Where no dispatcher runs, the requests are published here.
        dispatcher = RescoreDispatcher(deployment.engine, self._publisher, deployment.settings)
        watch = _Watch(deployment, processes)
        interrupt_on(SIGTERM)
        keep_open = False
        try:
            if job.is_ours and job.total:
                note(f"A worker is started here; it reads the queue {job.queue}.")
                options = WorkerOptions(concurrency, list(job.plugins))
                processes.start_workers(workers, options, queue=job.queue)
            self.request(job, awaited=True)
            waiting.wait(dispatcher.step, watch.check)
        except KeyboardInterrupt:
            # Do not wait for running requests: the next call requests their values again.
            processes.stop(at_once=True)
            # Only workers of this command read its own queue, so its requests end with it.
            keep_open = not job.is_ours
            rest = "The rest is scored by the run's workers" if keep_open else "Ask for the rest"
            note(
                f"Interrupted: {waiting}. These values are kept. "
                f"{rest}: rollout rescore {job.run.slug} --reward {job.reward}"
            )
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            deployment.transact(end_rescores, job.run, job.reward, keep_open=keep_open)
            processes.stop()
        return waiting

    def _has_workers(self, run: Run) -> bool:
        readers = self._publisher.count_readers(run.config.queue)
        if readers is not None:
            return readers > 0
        # Workers on SQS cannot be queried, and workers of a local run ended with it.
        return run.config.queue != own_queue_of(run.slug) and _has_process(
            self._deployment, "worker"
        )


class _Watch:
    """Checks that the processes of this command run, and that there is a collector."""

    def __init__(self, deployment: Deployment, processes: LocalProcesses) -> None:
        self._deployment = deployment
        self._processes = processes
        self._is_collected = False
        self._check_at = 0.0

    def check(self) -> None:
        self._processes.check()
        if self._is_collected or time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + _COLLECTOR_EVERY_S
        if not _has_process(self._deployment, "collector"):
            self._processes.start_controller(only="collector")
            self._is_collected = True


def _has_process(deployment: Deployment, kind: str) -> bool:
    seen = deployment.transact(list_processes)
    return any(each.kind == kind and not each.stopping for each in seen)
