"""`rollout up`, `down`: the private servers and the processes of a data directory."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from pipeline.settings import Settings
from rollout.deployment import (
    open_deployment,
    private_services,
    settings_of,
)
from rollout.options import DryRun, Json, WorkerOptions, Yes, takes
from rollout.output import confirm, note, print_json
from rollout.supervision import (
    WORKER,
    LocalProcesses,
    find_processes,
    stop_processes,
    worker_end_s,
)


@takes(WorkerOptions, "local")
def up(
    ctx: typer.Context,
    local: WorkerOptions,
    workers: Annotated[int, typer.Option(min=0, help="Workers to start, besides those here.")] = 1,
    as_json: Json = False,
) -> None:
    """Start servers, a controller and workers in the background.

    Private servers are started if no URL is set. `rollout down` stops everything.
    """
    settings = settings_of(ctx)
    with open_deployment(settings, broker=True, create=True) as deployment:
        processes = LocalProcesses(deployment.settings, stays=True)
        missing = workers - sum(child.kind == WORKER for child in processes.staying())
        processes.start(workers=max(0, missing), options=local)
        urls = _urls(settings, deployment.settings)
    children = [child.to_json() for child in find_processes(settings.data_dir)]
    if as_json:
        print_json({"urls": urls, "processes": children})
        return
    for name, url in urls.items():
        print(f"export {name}={shlex.quote(url)}")
    for child in children:
        print(f"# {child['kind']} (pid {child['pid']}), log {child['log']}")
    note("Stop everything: rollout down")


def down(
    ctx: typer.Context, yes: Yes = False, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Stop all servers and processes of this data directory.

    The command stops workers, the controller and the private servers. Data and results stay.
    """
    settings = settings_of(ctx)
    services, children = private_services(settings), find_processes(settings.data_dir)
    running = [server.name for server in services.status() if server.running]
    stopped = ", ".join([f"{child.kind} {child.pid}" for child in children] + running)
    if stopped and not dry_run:
        # Stopping loses no data, so scripts need not confirm.
        is_script = not sys.stdin.isatty()
        confirm(f"Stop {stopped}? Data and results stay.", yes=yes or is_script)
        if any(child.kind == WORKER for child in children):
            drain_s = settings.worker.drain_s
            note(f"Workers may finish what is under way, for {drain_s:g} s.")
        stop_processes(children, timeout_s=worker_end_s(settings))
        services.down()
    document = {
        "processes": [child.to_json() for child in children],
        "services": running,
        "dry_run": dry_run,
    }
    if as_json:
        print_json(document)
    elif not stopped:
        print("Nothing runs here.")
    else:
        print(f"{'Would stop' if dry_run else 'Stopped'} {stopped}.")


def _urls(named: Settings, resolved: Settings) -> dict[str, str]:
    """Return the environment variables with the private servers' URLs."""
    found: dict[str, str] = {"ROLLOUT_DATA_DIR": str(named.data_dir)}
    # A configured URL may contain a password, and its owner knows it already.
    if named.database.url is None and resolved.database.url is not None:
        found["ROLLOUT_DATABASE__URL"] = resolved.database.url.get_secret_value()
    if named.broker.url is None and resolved.broker.url is not None:
        found["ROLLOUT_BROKER__URL"] = resolved.broker.url.get_secret_value()
    return found
