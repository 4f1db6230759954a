"""`rollout ps`: the private servers of a data directory, its processes, and those of the store."""

from __future__ import annotations

from typing import Any

import typer

from pipeline.contract.errors import PipelineError
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.processes import Process, list_processes
from rollout.deployment import borrowed_store, private_services, settings_of
from rollout.options import Json
from rollout.output import fields, note, print_json, print_table
from rollout.supervision import find_processes


def ps(ctx: typer.Context, as_json: Json = False) -> None:
    """List servers and processes; starts nothing.

    The last table lists the processes that the store knows, also on other machines.
    """
    settings = settings_of(ctx)
    services = private_services(settings).status()
    children = find_processes(settings.data_dir)
    seen = _seen(settings)
    if as_json:
        print_json(
            {
                "services": [
                    fields(server, "name", "running", "pid", "url", "log")
                    | ({} if server.running else {"url": None})
                    for server in services
                ],
                "processes": [child.to_json() for child in children],
                "seen": [_seen_json(process) for process in seen],
            }
        )
        return
    print_table(
        ("private server", "state", "pid", "log"),
        [
            (server.name, "running" if server.running else "stopped", server.pid, server.log)
            for server in services
        ],
    )
    print_table(
        ("process", "pid", "started", "stays", "log"),
        [
            (child.kind, child.pid, child.started_at, "yes" if child.stays else "no", child.log)
            for child in children
        ],
    )
    print_table(
        ("seen by the store", "kind", "silent for", "in flight", "capacity"),
        [(p.process_id, p.kind, f"{p.silent_s:.1f} s", p.in_flight, p.capacity) for p in seen],
        right=("in flight", "capacity"),
    )


def _seen(settings: Settings) -> list[Process]:
    """Return the processes in the store, without starting its server."""
    if settings.embedded_database:
        server = next(s for s in private_services(settings).status() if s.name == "postgres")
        if not server.running:
            return []
    with borrowed_store(settings) as engine:
        try:
            return transact(engine, list_processes)
        except PipelineError as error:
            note(f"The store was not queried: {error}")
            return []


def _seen_json(process: Process) -> dict[str, Any]:
    names = ("process_id", "kind", "silent_s", "in_flight", "capacity", "stopping")
    return fields(process, *names) | {"silent_s": round(process.silent_s, 3)}
