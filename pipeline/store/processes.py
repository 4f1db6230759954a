"""Processes in the store: the workers and services that reported, and the collectors' watermark.

Used by the collector and the reconciler, and to explain what a run waits for. All times are those
of the database.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, text

#: A process that has not reported for this long does not count as alive.
ALIVE_S = 30.0

_REPORT = text("""
INSERT INTO processes (process_id, kind, read_up_to)
VALUES (:id, :kind, now() - make_interval(secs => :age_s))
ON CONFLICT (process_id) DO UPDATE SET last_seen_at = now(),
    read_up_to = coalesce(excluded.read_up_to, processes.read_up_to)
""")

_FORGET = text("DELETE FROM processes WHERE process_id = :id")

_WATERMARK = text("""
SELECT CASE WHEN bool_and(read_up_to IS NOT NULL) THEN min(read_up_to) END FROM processes
WHERE kind = 'collector' AND last_seen_at > now() - make_interval(secs => :alive_s)
""")

_LIST = text("""
SELECT process_id, kind, extract(epoch FROM now() - last_seen_at)::double precision AS silent_s,
       capacity, in_flight, loop_lag_ms, stopping,
       coalesce(takes -> 'queues', '[]') AS queues,
       coalesce(takes -> 'base_urls', '[]') AS base_urls
FROM processes WHERE NOT :alive_only OR last_seen_at > now() - make_interval(secs => :alive_s)
ORDER BY last_seen_at DESC, process_id
""")


class Process(NamedTuple):
    """A worker or a service as last seen."""

    process_id: str
    kind: str
    silent_s: float
    capacity: int | None
    in_flight: int | None
    loop_lag_ms: float | None
    stopping: bool
    queues: tuple[str, ...] = ()  #: queues that a worker takes requests from
    base_urls: tuple[str, ...] = ()  #: endpoints it may call besides loopback


def report_process(
    connection: Connection, process_id: str, kind: str, *, watermark_age_s: float | None = None
) -> None:
    """Record that a service is alive; a collector adds the age of its watermark."""
    connection.execute(_REPORT, {"id": process_id, "kind": kind, "age_s": watermark_age_s})


def forget_process(connection: Connection, process_id: str) -> None:
    """Remove a process that ended in order."""
    connection.execute(_FORGET, {"id": process_id})


def read_watermark(connection: Connection, *, alive_s: float = ALIVE_S) -> datetime | None:
    """Return the time up to which all messages of workers were read, None while it is unknown.

    With several collectors the watermark is that of the slowest.

    Args:
        connection: An open transaction.
        alive_s: Silence after which a collector counts as dead and is left out.
    """
    return connection.execute(_WATERMARK, {"alive_s": alive_s}).scalar_one()


def list_processes(connection: Connection, *, alive_only: bool = True) -> list[Process]:
    """Return the processes that reported, most recent first."""
    rows = connection.execute(_LIST, {"alive_only": alive_only, "alive_s": ALIVE_S})
    return [Process._make((*row[:7], tuple(row.queues), tuple(row.base_urls))) for row in rows]
