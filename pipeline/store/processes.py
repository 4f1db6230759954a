"""Processes in the store: which workers and services were seen, and how far they have read.

Used by the collector and the reconciler, and to say what a run waits for. Database clock only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

#: A process not heard of for this long is not counted as alive.
ALIVE_S = 30.0


@dataclass(frozen=True, slots=True)
class Process:
    """A worker or a service as last seen."""

    process_id: str
    kind: str
    silent_s: float
    capacity: int | None
    in_flight: int | None
    loop_lag_ms: float | None
    stopping: bool
    queues: tuple[str, ...] = ()  #: where a worker takes requests from
    base_urls: tuple[str, ...] = ()  #: endpoints it may call besides loopback


def report_process(
    connection: Connection, process_id: str, kind: str, *, watermark_age_s: float | None = None
) -> None:
    """Say that a service is there; a collector adds how long ago it had read everything."""
    connection.execute(
        text("""
            INSERT INTO processes (process_id, kind, read_up_to)
            VALUES (:id, :kind, now() - make_interval(secs => :ago))
            ON CONFLICT (process_id) DO UPDATE SET last_seen_at = now(),
                read_up_to = coalesce(excluded.read_up_to, processes.read_up_to)
        """),
        {"id": process_id, "kind": kind, "ago": watermark_age_s},
    )


def forget_process(connection: Connection, process_id: str) -> None:
    """Remove a process that ended in order."""
    connection.execute(text("DELETE FROM processes WHERE process_id = :id"), {"id": process_id})


def read_watermark(connection: Connection, *, alive_s: float = ALIVE_S) -> datetime | None:
    """Return until when all messages of workers were read, None while nobody can say.

    With several collectors it is what the slowest has read.

    Args:
        connection: An open transaction.
        alive_s: Silence after which a collector is dead, and holds nobody up any more.
    """
    return connection.execute(
        text("""
            SELECT CASE WHEN bool_and(read_up_to IS NOT NULL) THEN min(read_up_to) END
            FROM processes
            WHERE kind = 'collector' AND last_seen_at > now() - make_interval(secs => :alive_s)
        """),
        {"alive_s": alive_s},
    ).scalar_one()


def list_processes(connection: Connection, *, alive_only: bool = True) -> list[Process]:
    """Return what was seen, most recent first."""
    rows = connection.execute(
        text("""
            SELECT process_id, kind, extract(epoch FROM now() - last_seen_at) AS silent_s,
                   capacity, in_flight, loop_lag_ms, stopping, takes
            FROM processes
            WHERE NOT :alive_only OR last_seen_at > now() - make_interval(secs => :alive_s)
            ORDER BY last_seen_at DESC, process_id
        """),
        {"alive_only": alive_only, "alive_s": ALIVE_S},
    )
    return [
        Process(
            row.process_id,
            row.kind,
            float(row.silent_s),
            row.capacity,
            row.in_flight,
            row.loop_lag_ms,
            row.stopping,
            *(tuple((row.takes or {}).get(name, ())) for name in ("queues", "base_urls")),
        )
        for row in rows
    ]
