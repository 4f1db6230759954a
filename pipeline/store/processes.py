"""Processes in the store: the workers and collectors that reported.

Read by commands that look for workers, and by the store for the reasons of waits. All times are
those of the database. Must not: write; `leases.py` and `watermark.py` do.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, text

#: A process that has not reported for this long does not count as alive.
ALIVE_S = 30.0

_LIST = text("""
SELECT process_id, kind, extract(epoch FROM now() - last_seen_at)::double precision AS silent_s,
       capacity, in_flight, loop_lag_ms, stopping,
       coalesce(takes -> 'queues', '[]') AS queues,
       coalesce(takes -> 'base_urls', '[]') AS base_urls
FROM processes WHERE last_seen_at > now() - make_interval(secs => :alive_s)
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


def list_processes(connection: Connection) -> list[Process]:
    """Return the processes that are alive, the last seen first."""
    rows = connection.execute(_LIST, {"alive_s": ALIVE_S})
    return [Process._make((*row[:7], tuple(row.queues), tuple(row.base_urls))) for row in rows]
