"""`rollout run` and `resume`: everything a run needs on this machine, until it is done.

Private servers where none are named, workers and a controller of its own, the dataset, the wait.
Ctrl-C drains the workers; the servers and all results stay.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.contract.base_urls import base_url_of, urls_of
from pipeline.contract.errors import NotAllowed, WaitTimeout
from pipeline.contract.rollout import RunState
from rollout.commands.runs import exit_code, print_status
from rollout.commands.submit import (
    SubmitOptions,
    enqueue_dataset,
    name_and_split,
    new_slug,
    require_source,
    submission_json,
)
from rollout.deployment import Deployment, open_deployment, settings_of
from rollout.endpoint import Endpoints, find_endpoints, worker_environment
from rollout.local_processes import LocalProcesses
from rollout.local_queue import request_queue, require_allowed_endpoint, stored_run
from rollout.options import Json, RunName, WorkerOptions, takes
from rollout.output import note, print_json
from rollout.progress import wait_for_run
from rollout.run_config import run_config

if TYPE_CHECKING:
    from pipeline.contract.run import RunConfig
    from pipeline.settings import Settings
    from pipeline.store.runs import Run

EXIT_INTERRUPTED = 130

Workers = Annotated[int, typer.Option(min=0, help="Worker processes to start here.")]
Wait = Annotated[
    bool, typer.Option("--wait/--detach", help="Wait for the end, or leave it to the background.")
]
WaitTimeoutS = Annotated[
    float | None,
    typer.Option(
        "--wait-timeout", min=0, help="Longest wait, in seconds; then its processes are stopped."
    ),
]


@takes(SubmitOptions, "options")
@takes(WorkerOptions, "local")
def run(
    ctx: typer.Context,
    options: SubmitOptions,
    local: WorkerOptions,
    workers: Workers = 1,
    wait: Wait = True,
    wait_timeout_s: WaitTimeoutS = None,
    as_json: Json = False,
) -> None:
    """Run a dataset through an agent here, and wait.

    What it needs is started on this machine and stopped at the end, except private servers. Exit
    code 4 says that the run failed: more than half of its rollouts, or all of the first ones, when
    it is paused. --max-error-rate names another share; 1 allows every failure.
    """
    from rollout.known_names import require_known

    settings = settings_of(ctx)
    asked = run_config(options, settings.run)
    plugins = local.plugin or settings.worker.plugins
    require_known(asked, plugins=plugins)
    named = urls_of(asked.base_url)
    here = find_endpoints(settings, asked, named=named)
    require_source(options)
    slug = options.run or new_slug(name_and_split(options)[0])

    def settle(deployment: Deployment) -> RunConfig:
        stored = stored_run(deployment, slug)
        if stored is not None:
            return _as_stored(settings, asked, stored.config, here)
        config = asked.model_copy(update={"base_url": base_url_of(here.urls), "model": here.model})
        if not (wait and workers):
            return config
        queue = request_queue(deployment, config, local, slug=slug)
        return config.model_copy(update={"queue": queue})

    def enqueue(deployment: Deployment, config: RunConfig) -> Run:
        report, skipped = enqueue_dataset(deployment, options, config, slug=slug, plugins=plugins)
        document = submission_json(report, skipped)
        if not wait and as_json:
            print_json(document)
        else:
            note(
                f"Run {slug}: {report.prompts} prompts, {report.rollouts} rollouts; "
                f"{report.added} prompts are new."
            )
        return report.run

    _run_here(
        settings,
        slug,
        settle,
        enqueue,
        here=here,
        named=named,
        local=local,
        workers=workers,
        wait=wait,
        wait_timeout_s=wait_timeout_s,
        as_json=as_json,
    )


@takes(WorkerOptions, "local")
def resume(
    ctx: typer.Context,
    run: RunName = "@last",
    local: WorkerOptions = WorkerOptions(),  # noqa: B008 (replaced by `takes`)
    base_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="The run's endpoint from now on; repeat for replicas."),
    ] = None,
    workers: Workers = 1,
    wait: Wait = True,
    wait_timeout_s: WaitTimeoutS = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was interrupted.

    Processes are started on this machine as `rollout run` does, and the command waits for the end.
    """
    from pipeline.store.runs import move_run
    from rollout.known_names import require_known

    settings = settings_of(ctx)
    with open_deployment(settings) as deployment:
        found = _resumable(deployment, run)
    named = tuple(base_url or ())
    config = found.config
    if named:
        config = config.model_copy(update={"base_url": base_url_of(named)})
    require_known(config, plugins=local.plugin or settings.worker.plugins)
    here = find_endpoints(settings, config, named=named)

    def settle(deployment: Deployment) -> RunConfig:
        if config != found.config:
            deployment.transact(lambda connection: move_run(connection, found, config))
        return config

    _run_here(
        settings,
        found.slug,
        settle,
        lambda *_: found,
        here=here,
        named=named,
        local=local,
        workers=workers,
        wait=wait,
        wait_timeout_s=wait_timeout_s,
        as_json=as_json,
    )


def _as_stored(
    settings: Settings, asked: RunConfig, stored: RunConfig, here: Endpoints
) -> RunConfig:
    """Fill in what this call leaves open from what the run's first call settled."""
    from pipeline.contract.run import DEFAULT_REQUEST_QUEUE

    fields = ("base_url", "model")
    settled = {name: getattr(stored, name) for name in fields if getattr(asked, name) is None}
    if asked.queue == DEFAULT_REQUEST_QUEUE:
        settled["queue"] = stored.queue
    config = asked.model_copy(update=settled)
    if not set(urls_of(config.base_url)) <= set(here.urls):
        find_endpoints(settings, config, named=here.urls)
    return config


def _resumable(deployment: Deployment, name: str) -> Run:
    from pipeline.store.operations import continue_run
    from pipeline.store.runs import get_run

    found = deployment.transact(lambda connection: get_run(connection, name))
    if found.sealed_at is None:
        raise NotAllowed(
            f"Not all prompts of run {found.slug} were enqueued.",
            remedy=f"Repeat the first command with --run {found.slug}: it adds what is missing.",
        )
    if found.state is not RunState.ACTIVE:
        deployment.transact(lambda connection: continue_run(connection, found))
    return found


def _run_here(
    settings: Settings,
    slug: str,
    settle: Callable[[Deployment], RunConfig],
    begin: Callable[[Deployment, RunConfig], Run],
    *,
    here: Endpoints,
    named: tuple[str, ...],
    local: WorkerOptions,
    workers: int,
    wait: bool,
    wait_timeout_s: float | None,
    as_json: bool,
) -> None:
    """Start processes, begin a run, wait for it, stop the processes.

    Args:
        settings: Of this process.
        slug: The run's name.
        settle: Says what the run asks for, before anything is started for it.
        begin: Begins the run.
        here: The endpoints that answered, and their model.
        named: Endpoints that the options name.
        local: How workers are run.
        workers: How many.
        wait: Whether to wait for the end.
        wait_timeout_s: Longest wait.
        as_json: How to say how it ended.
    """
    from pipeline.store.status import run_status

    signal.signal(signal.SIGTERM, _interrupt)
    with open_deployment(settings, broker=True, create=True) as deployment:
        config = settle(deployment)
        require_allowed_endpoint(deployment, config)
        called = Endpoints(urls_of(config.base_url) or here.urls, config.model or here.model)
        environment = worker_environment(settings, called, named=named)
        if wait:
            # What ends with this run leaves other runs alone: their rollouts, tokens and errors.
            environment |= {"ROLLOUT_DISPATCH__RUNS": json.dumps([slug])}
        processes = LocalProcesses(deployment.settings, environment, stays=not wait)
        try:
            processes.start(workers=workers, options=local, queue=config.queue)
            found = begin(deployment, config)
            if not wait:
                processes.leave()
                note(f"It goes on in the background. Follow it: rollout watch {found.slug}")
                return
            wait_for_run(
                deployment,
                found,
                check=processes.check,
                started=processes.kinds,
                timeout_s=wait_timeout_s,
                after_timeout="The run is kept, but what this command started for it is stopped. "
                "Go on with it: rollout resume",
            )
        except KeyboardInterrupt:
            _drain(processes, settings)
            note(f"Nothing that was done is lost. Go on: rollout resume {slug}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except WaitTimeout:
            _drain(processes, settings)
            raise
        finally:
            processes.stop()
        # The workers' last figures came while they were stopped.
        final = deployment.transact(lambda connection: run_status(connection, found))
    if as_json:
        print_json(final.to_json())
    else:
        print_status(final)
    raise typer.Exit(exit_code(final, go_on="resume"))


def _drain(processes: LocalProcesses, settings: Settings) -> None:
    """Stop the processes, and say meanwhile what is waited for."""
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
