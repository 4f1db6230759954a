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

from pipeline.cli.deployment import Deployment, open_deployment, settings_of
from pipeline.cli.endpoint import endpoint_of, require_endpoint
from pipeline.cli.local_processes import LocalProcesses
from pipeline.cli.local_queue import request_queue, stored_queue
from pipeline.cli.options import Json, RunName, WorkerOptions, takes
from pipeline.cli.output import note, print_json
from pipeline.cli.progress import wait_for_run
from pipeline.cli.run_config import run_config
from pipeline.cli.runs import exit_code, print_status
from pipeline.cli.submit import (
    SubmitOptions,
    enqueue_dataset,
    name_and_split,
    new_slug,
    require_source,
    submission_json,
)
from pipeline.contract.errors import Refused, WaitTimeout
from pipeline.contract.rollout import RunState

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
    settings = settings_of(ctx)
    config = run_config(options, settings.run)
    environment = _prepare(settings, config, local)
    require_source(options)
    slug = options.run or new_slug(name_and_split(options)[0])
    if wait and workers:
        queue = request_queue(settings, config, local, slug=slug)
        config = config.model_copy(update={"queue": queue})

    def enqueue(deployment: Deployment) -> Run:
        report, skipped = enqueue_dataset(deployment, options, config, slug=slug)
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
        enqueue,
        queue=config.queue,
        environment=environment,
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
        str | None, typer.Option(metavar="URL", help="Endpoint, where the run names none.")
    ] = None,
    workers: Workers = 1,
    wait: Wait = True,
    wait_timeout_s: WaitTimeoutS = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was interrupted.

    Processes are started on this machine as `rollout run` does, and the command waits for the end.
    """
    settings = settings_of(ctx)
    with open_deployment(settings) as deployment:
        found = _resumable(deployment, run)
    config = found.config
    if config.base_url is None and base_url is not None:
        config = config.model_copy(update={"base_url": base_url})
    _run_here(
        settings,
        found.slug,
        lambda _: found,
        queue=config.queue,
        environment=_prepare(settings, config, local),
        local=local,
        workers=workers,
        wait=wait,
        wait_timeout_s=wait_timeout_s,
        as_json=as_json,
    )


def _prepare(settings: Settings, config: RunConfig, local: WorkerOptions) -> dict[str, str]:
    """Check what can be checked before anything is started; return what workers are told."""
    from pipeline.cli.known_names import require_known

    require_known(config, plugins=local.plugin or settings.worker.plugins)
    base_url = endpoint_of(settings, config.base_url)
    found = require_endpoint(settings, base_url)
    told: dict[str, str] = {}
    if settings.llm.base_url in (None, base_url):
        told["ROLLOUT_LLM__BASE_URL"] = base_url
    else:
        # The key in the settings belongs to their own endpoint; this one is called without.
        allowed = [*settings.worker.allowed_base_urls, base_url]
        told["ROLLOUT_WORKER__ALLOWED_BASE_URLS"] = json.dumps(allowed)
    if config.model is None and settings.llm.model is None and len(found.models) == 1:
        told["ROLLOUT_LLM__MODEL"] = found.models[0]
    return told


def _resumable(deployment: Deployment, name: str) -> Run:
    from pipeline.store.operations import continue_run
    from pipeline.store.runs import get_run

    found = deployment.transact(lambda connection: get_run(connection, name))
    if found.sealed_at is None:
        raise Refused(
            f"Not all prompts of run {found.slug} were enqueued.",
            remedy=f"Repeat the first command with --run {found.slug}: it adds what is missing.",
        )
    if found.state is not RunState.ACTIVE:
        deployment.transact(lambda connection: continue_run(connection, found))
    return found


def _run_here(
    settings: Settings,
    slug: str,
    begin: Callable[[Deployment], Run],
    *,
    queue: str,
    environment: dict[str, str],
    local: WorkerOptions,
    workers: int,
    wait: bool,
    wait_timeout_s: float | None,
    as_json: bool,
) -> None:
    """Start processes, begin a run, wait for it, stop the processes."""
    if wait:
        # What ends with this run leaves other runs alone: their rollouts, tokens and errors.
        environment = environment | {"ROLLOUT_DISPATCH__RUNS": json.dumps([slug])}
    signal.signal(signal.SIGTERM, _interrupt)
    with open_deployment(settings, broker=True, create=True) as deployment:
        processes = LocalProcesses(deployment.settings, environment, stays=not wait)
        try:
            queue = stored_queue(deployment, slug) or queue
            processes.start(workers=workers, options=local, queue=queue)
            found = begin(deployment)
            if not wait:
                processes.leave()
                note(f"It goes on in the background. Follow it: rollout watch {found.slug}")
                return
            final = wait_for_run(
                deployment,
                found,
                check=processes.check,
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
