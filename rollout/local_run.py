"""A run on this machine: start processes, enqueue the dataset, wait for the end.

`rollout run` and `resume` use it. An interruption drains the workers; servers and results stay.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pipeline.contract.base_urls import base_url_of, urls_of
from pipeline.contract.errors import NotAllowed, WaitTimeout
from pipeline.contract.rollout import RunState
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, RunConfig
from pipeline.settings import Settings
from pipeline.store.operations import continue_run
from pipeline.store.runs import Run, move_run
from pipeline.store.status import RunStatus, run_status
from rollout.deployment import Deployment, open_deployment
from rollout.endpoint import Endpoints, find_endpoints, worker_environment
from rollout.known_names import require_known
from rollout.options import WorkerOptions
from rollout.output import note
from rollout.progress import wait_for_run
from rollout.remote_sessions import require_shared_pace_here, wait_for_sessions
from rollout.request_queue import request_queue, require_allowed_endpoint
from rollout.run_options import SubmitOptions, run_config
from rollout.submission import (
    enqueue_dataset,
    name_and_split,
    new_slug,
    require_source,
    submission_json,
)
from rollout.supervision import LocalProcesses

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options for the processes and the wait of this command."""

    workers: Annotated[int, typer.Option(min=0, help="Worker processes to start here.")] = 1
    wait: Annotated[
        bool,
        typer.Option("--wait/--detach", help="Wait for the end, or run in the background."),
    ] = True
    wait_timeout_s: Annotated[
        float | None,
        typer.Option(
            "--wait-timeout",
            min=0,
            help="Longest wait, in seconds; then the run's processes are stopped.",
        ),
    ] = None


def run_dataset(
    settings: Settings,
    options: SubmitOptions,
    worker: WorkerOptions,
    local: LocalOptions,
    *,
    on_enqueued: Callable[[dict[str, Any]], None],
) -> RunStatus | None:
    """Run a dataset; return the final status, None if the run is left in the background.

    Args:
        settings: The settings of this process.
        options: The dataset and the run's configuration.
        worker: Options of the workers.
        local: Options for the processes and the wait of this command.
        on_enqueued: Called with the document of `rollout submit --json`.
    """
    asked = run_config(options, settings.run, agentcore=settings.agentcore)
    plugins = worker.plugin or settings.worker.plugins
    require_known(asked, plugins=plugins, mcp_servers=settings.worker.mcp)
    named = urls_of(asked.base_url)
    here = _endpoints(settings, asked, named=named)
    require_source(options)
    slug = options.run or new_slug(name_and_split(options)[0])

    def settle(deployment: Deployment) -> RunConfig:
        stored = deployment.find_exactly(slug)
        if stored is not None:
            return _as_stored(settings, asked, stored.config, here)
        config = asked
        if asked.agentcore is None:
            found = {"base_url": base_url_of(here.urls), "model": here.model}
            config = asked.model_copy(update=found)
        if not (local.wait and local.workers):
            return config
        queue = request_queue(deployment, config, worker, slug=slug)
        return config.model_copy(update={"queue": queue})

    def enqueue(deployment: Deployment, config: RunConfig) -> Run:
        report, skipped = enqueue_dataset(deployment, options, config, slug=slug, plugins=plugins)
        on_enqueued(submission_json(report, skipped))
        return report.run

    return _run_here(settings, slug, settle, enqueue, here, named, worker, local)


def resume_run(
    settings: Settings,
    name: str,
    worker: WorkerOptions,
    local: LocalOptions,
    *,
    base_urls: tuple[str, ...],
) -> RunStatus | None:
    """Resume a run, as `run_dataset` does; `base_urls`, if any, replace its endpoints.

    Raises:
        NotAllowed: Some of its prompts were not enqueued.
    """
    with open_deployment(settings) as deployment:
        found = _resumable(deployment, name)
    config = found.config
    if base_urls:
        config = config.model_copy(update={"base_url": base_url_of(base_urls)})
    plugins = worker.plugin or settings.worker.plugins
    require_known(config, plugins=plugins, mcp_servers=settings.worker.mcp)
    here = _endpoints(settings, config, named=base_urls)

    def settle(deployment: Deployment) -> RunConfig:
        if config != found.config:
            deployment.transact(move_run, found, config)
        return config

    return _run_here(settings, found.slug, settle, lambda *_: found, here, base_urls, worker, local)


def _endpoints(settings: Settings, config: RunConfig, *, named: Collection[str]) -> Endpoints:
    """Probe the run's endpoints; those of a remote agent are called by its sessions alone."""
    if config.agentcore is not None:
        require_shared_pace_here(settings)
        return Endpoints((), config.model)
    return find_endpoints(settings, config, named=named)


def _as_stored(
    settings: Settings, asked: RunConfig, stored: RunConfig, here: Endpoints
) -> RunConfig:
    """Fill fields that this call leaves open with the values that the first call stored."""
    fields = ("base_url", "model")
    settled = {name: getattr(stored, name) for name in fields if getattr(asked, name) is None}
    if asked.queue == DEFAULT_REQUEST_QUEUE:
        settled["queue"] = stored.queue
    config = asked.model_copy(update=settled)
    if config.agentcore is None and not set(urls_of(config.base_url)) <= set(here.urls):
        find_endpoints(settings, config, named=here.urls)
    return config


def _resumable(deployment: Deployment, name: str) -> Run:
    found = deployment.find_run(name)
    if found.sealed_at is None:
        raise NotAllowed(
            f"Not all prompts of run {found.slug} were enqueued.",
            remedy=f"Repeat the first command with --run {found.slug}: it adds what is missing.",
        )
    if found.state is not RunState.ACTIVE:
        deployment.transact(continue_run, found)
    return found


def _run_here(
    settings: Settings,
    slug: str,
    settle: Callable[[Deployment], RunConfig],
    begin: Callable[[Deployment, RunConfig], Run],
    here: Endpoints,
    named: tuple[str, ...],
    worker: WorkerOptions,
    local: LocalOptions,
) -> RunStatus | None:
    """Start processes, begin a run, wait for it, stop the processes.

    Args:
        settings: The settings of this process.
        slug: The run's name.
        settle: Returns the run's configuration, before processes are started.
        begin: Begins the run.
        here: The endpoints that answered, and their model.
        named: Endpoints in the caller's options.
        worker: Options of the workers.
        local: Options for the processes and the wait of this command.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    with open_deployment(settings, broker=True, create=True) as deployment:
        config = settle(deployment)
        environment: dict[str, str] = {}
        require_allowed_endpoint(deployment, config)
        if config.agentcore is not None:
            allowed = [*settings.worker.allowed_urls, *config.called_urls]
            environment = {"ROLLOUT_WORKER__ALLOWED_BASE_URLS": json.dumps(allowed)}
        else:
            called = Endpoints(urls_of(config.base_url) or here.urls, config.model or here.model)
            environment = worker_environment(settings, called, named=named)
        if local.wait:
            # Processes that end with this run must not take other runs' rollouts.
            environment |= {"ROLLOUT_DISPATCH__RUNS": json.dumps([slug])}
        processes = LocalProcesses(deployment.settings, environment, stays=not local.wait)
        try:
            processes.start(workers=local.workers, options=worker, queue=config.queue)
            found = begin(deployment, config)
            if not local.wait:
                processes.leave()
                note(f"It goes on in the background. Follow it: rollout watch {found.slug}")
                return None
            wait_for_run(
                deployment,
                found,
                check=processes.check,
                started=processes.kinds,
                timeout_s=local.wait_timeout_s,
                after_timeout="The run is kept, but what this command started for it is stopped. "
                "Go on with it: rollout resume",
            )
            if config.agentcore is not None:
                wait_for_sessions(deployment, found, check=processes.check)
        except KeyboardInterrupt:
            _drain(processes, settings)
            note(f"Nothing that was done is lost. Go on: rollout resume {slug}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except WaitTimeout:
            _drain(processes, settings)
            raise
        finally:
            processes.stop()
        # Read the status again, because the workers' last completions came while they stopped.
        return deployment.transact(run_status, found)


def _drain(processes: LocalProcesses, settings: Settings) -> None:
    """Stop the processes, and print a note about the wait."""
    try:
        note(
            f"Stopping: what is under way may finish for {settings.worker.drain_s:g} s. "
            "Ctrl-C again stops at once."
        )
        processes.stop()
    except KeyboardInterrupt:
        processes.stop(at_once=True)
        note("Stopped at once; what was under way is given up and run again.")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
