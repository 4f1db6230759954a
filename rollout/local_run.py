"""A run on this machine: start processes, enqueue the dataset, wait for the end.

`rollout run` and `resume` use it. An interruption drains the workers; servers and results stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from signal import SIGTERM

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
from rollout.options import LocalOptions, WorkerOptions
from rollout.output import note
from rollout.progress import wait_for_run
from rollout.remote_sessions import require_shared_pace_here, wait_for_sessions
from rollout.request_queue import request_queue, require_allowed_endpoint
from rollout.run_options import SubmitOptions, run_config
from rollout.signals import EXIT_INTERRUPTED, interrupt_on
from rollout.submission import (
    Submission,
    enqueue_dataset,
    name_and_split,
    new_slug,
    require_source,
)
from rollout.supervision import LocalProcesses


def run_dataset(
    settings: Settings,
    options: SubmitOptions,
    worker: WorkerOptions,
    local: LocalOptions,
    *,
    on_enqueued: Callable[[Submission], None],
) -> RunStatus | None:
    """Run a dataset; return the final status, None if the run is left in the background.

    Args:
        settings: The settings of this process.
        options: The dataset and the run's configuration.
        worker: Options of the workers.
        local: Options for the processes and the wait of this command.
        on_enqueued: Called before the wait.
    """
    requested = run_config(options, settings.run, agentcore=settings.agentcore)
    plugins = worker.plugin or settings.worker.plugins
    require_known(requested, plugins=plugins, mcp_servers=settings.worker.mcp)
    named = urls_of(requested.base_url)
    endpoints = _endpoints(settings, requested, named=named)
    require_source(options)
    slug = options.run or new_slug(name_and_split(options)[0])

    interrupt_on(SIGTERM)
    with open_deployment(settings, broker=True, create=True) as deployment:
        stored = deployment.find_exactly(slug)
        if stored is None:
            config = _as_new(deployment, requested, slug, endpoints, worker, local)
        else:
            config = _as_stored(settings, requested, stored.config, endpoints)

        def begin() -> Run:
            submission = enqueue_dataset(deployment, options, config, slug=slug, plugins=plugins)
            on_enqueued(submission)
            return submission.report.run

        return _run_here(deployment, slug, config, begin, endpoints, named, worker, local)


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
    endpoints = _endpoints(settings, config, named=base_urls)

    interrupt_on(SIGTERM)
    with open_deployment(settings, broker=True, create=True) as deployment:
        if config != found.config:
            deployment.transact(move_run, found, config)
        return _run_here(
            deployment, found.slug, config, lambda: found, endpoints, base_urls, worker, local
        )


def _endpoints(settings: Settings, config: RunConfig, *, named: Collection[str]) -> Endpoints:
    """Probe the run's endpoints; those of a remote agent are called by its sessions alone."""
    if config.agentcore is not None:
        require_shared_pace_here(settings)
        return Endpoints((), config.model)
    return find_endpoints(settings, config, named=named)


def _as_new(
    deployment: Deployment,
    requested: RunConfig,
    slug: str,
    endpoints: Endpoints,
    worker: WorkerOptions,
    local: LocalOptions,
) -> RunConfig:
    """Fill the fields that this call leaves open: the endpoint, the model, the request queue."""
    config = requested
    if requested.agentcore is None:
        found = {"base_url": base_url_of(endpoints.urls), "model": endpoints.model}
        config = requested.model_copy(update=found)
    if not (local.wait and local.workers):
        return config
    queue = request_queue(deployment, config, worker, slug=slug)
    return config.model_copy(update={"queue": queue})


def _as_stored(
    settings: Settings, requested: RunConfig, stored: RunConfig, endpoints: Endpoints
) -> RunConfig:
    """Fill fields that this call leaves open with the values that the first call stored."""
    fields = ("base_url", "model")
    settled = {name: getattr(stored, name) for name in fields if getattr(requested, name) is None}
    if requested.queue == DEFAULT_REQUEST_QUEUE:
        settled["queue"] = stored.queue
    config = requested.model_copy(update=settled)
    if config.agentcore is None and not set(urls_of(config.base_url)) <= set(endpoints.urls):
        find_endpoints(settings, config, named=endpoints.urls)
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
    deployment: Deployment,
    slug: str,
    config: RunConfig,
    begin: Callable[[], Run],
    endpoints: Endpoints,
    named: tuple[str, ...],
    worker: WorkerOptions,
    local: LocalOptions,
) -> RunStatus | None:
    """Start processes, begin a run, wait for it, stop the processes.

    Args:
        deployment: The store and the settings.
        slug: The run's name.
        config: The run's configuration.
        begin: Begins the run, after its processes were started.
        endpoints: The endpoints that answered, and their model.
        named: Endpoints in the caller's options.
        worker: Options of the workers.
        local: Options for the processes and the wait of this command.
    """
    settings = deployment.settings
    require_allowed_endpoint(deployment, config)
    if config.agentcore is not None:
        allowed = [*settings.worker.allowed_urls, *config.called_urls]
        environment = {"ROLLOUT_WORKER__ALLOWED_BASE_URLS": json.dumps(allowed)}
    else:
        called = Endpoints(
            urls_of(config.base_url) or endpoints.urls, config.model or endpoints.model
        )
        environment = worker_environment(settings, called, named=named)
    if local.wait:
        # Processes that end with this run must not take other runs' rollouts.
        environment |= {"ROLLOUT_DISPATCH__RUNS": json.dumps([slug])}
    processes = LocalProcesses(settings, environment, stays=not local.wait)
    try:
        processes.start(workers=local.workers, options=worker, queue=config.queue)
        found = begin()
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
        _drain(processes)
        note(f"Finished rollouts are kept. Resume the run: rollout resume {slug}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except WaitTimeout:
        _drain(processes)
        raise
    finally:
        processes.stop()
    # Read the status again, because the workers' last completions came while they stopped.
    return deployment.transact(run_status, found)


def _drain(processes: LocalProcesses) -> None:
    """Stop the processes, and print a note about the wait."""
    try:
        note(
            f"Stopping: what is under way may finish for {processes.settings.worker.drain_s:g} s. "
            "Ctrl-C again stops at once."
        )
        processes.stop()
    except KeyboardInterrupt:
        processes.stop(at_once=True)
        note("Stopped at once; what was under way is given up and run again.")
