"""Runs in the store: created once, found by slug, paused, cancelled, listed.

Used by producers, dispatcher and the command line. Must not: know the broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, select, text, update
from sqlalchemy.dialects.postgresql import insert

from pipeline.contract.errors import NotAllowed, NotFound
from pipeline.contract.rollout import RunState, run_id_of
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, RunConfig, RunOrigin, own_queue_of
from pipeline.store.tables import runs
from pipeline.store.working_time import advance_clock


@dataclass(frozen=True, slots=True)
class Run:
    """A run as stored."""

    run_id: UUID
    slug: str
    state: RunState
    state_reason: str | None
    config: RunConfig
    policy_version: int
    created_at: datetime
    sealed_at: datetime | None
    origin: RunOrigin = field(default_factory=RunOrigin)


def create_run(
    connection: Connection,
    slug: str,
    config: RunConfig,
    *,
    name: str = "",
    origin: RunOrigin | None = None,
) -> Run:
    """Create the run, or return the one of this slug if it asks for the same thing.

    The origin of a run is that of its first call.

    Raises:
        NotAllowed: A run of this slug exists and asks for something else.
    """
    connection.execute(
        insert(runs)
        .values(
            run_id=_new_id(connection, slug),
            slug=slug,
            name=name or slug,
            purpose=config.purpose,
            # Beside the fields of the configuration: it is not what the run asks for.
            config=config.model_dump(mode="json")
            | {"origin": (origin or RunOrigin()).model_dump(mode="json")},
            config_digest=config.digest(),
            max_in_flight=config.max_in_flight,
        )
        .on_conflict_do_nothing()
    )
    run = get_run(connection, slug)
    if differences := _differences(run, config):
        raise NotAllowed(
            f"Run {slug} exists and asks for something else.",
            why=f"It differs in: {', '.join(differences)}.",
            remedy="Choose another name with --run, or repeat the options of the first call.",
        )
    return run


def get_run(connection: Connection, slug: str) -> Run:
    """Return the run with this slug, a unique beginning of it, or `@last`.

    Raises:
        NotFound: None, or several.
    """
    query = select(runs).order_by(runs.c.created_at.desc(), runs.c.slug).limit(6)
    if slug != "@last":
        query = query.where(runs.c.slug.startswith(slug, autoescape=True))
    found = connection.execute(query).all()
    exact = [row for row in found if row.slug == slug]
    if exact or (found and slug == "@last"):
        return _run((exact or list(found))[0])
    # The exact slug may hide behind six newer runs that begin with it.
    row = connection.execute(select(runs).where(runs.c.slug == slug)).one_or_none()
    if row:
        return _run(row)
    if len(found) == 1:
        return _run(found[0])
    if found:
        names = ", ".join(row.slug for row in found[:5])
        raise NotFound(f"{slug!r} could be several runs: {names}.", remedy="Name one of them.")
    raise NotFound(f"There is no run {slug!r}.", remedy="See: rollout runs")


def list_runs(connection: Connection, *, limit: int = 100) -> list[Run]:
    """Return the newest runs first."""
    query = select(runs).order_by(runs.c.created_at.desc()).limit(limit)
    return [_run(row) for row in connection.execute(query)]


def active_runs(connection: Connection) -> list[Run]:
    """Return the runs with queued rollouts that may be dispatched, highest priority first."""
    query = select(runs).where(
        runs.c.state == RunState.ACTIVE,
        text("EXISTS (SELECT FROM rollouts r WHERE r.run_id = runs.run_id AND r.state = 'queued')"),
    )
    found = [_run(row) for row in connection.execute(query)]
    return sorted(found, key=lambda run: (-run.config.priority, run.created_at))


def ids_of(connection: Connection, slugs: Sequence[str]) -> frozenset[UUID]:
    """Return the ids of those runs that exist."""
    return frozenset(
        connection.execute(select(runs.c.run_id).where(runs.c.slug.in_(slugs))).scalars()
    )


def list_queues(connection: Connection) -> list[str]:
    """Return the request queues that runs with rollouts in flight use."""
    query = text("""
        SELECT DISTINCT config ->> 'queue' FROM runs
        WHERE run_id IN (
            SELECT DISTINCT run_id FROM rollouts WHERE state IN ('dispatched', 'running'))
    """)
    return list(connection.execute(query).scalars())


def move_run(connection: Connection, run: Run, config: RunConfig) -> None:
    """Give a run the endpoint of this configuration; requests that are out keep the old one."""
    changed = config.model_dump(mode="json", include={"base_url"})
    connection.execute(
        update(runs)
        .where(runs.c.run_id == run.run_id)
        .values(config=runs.c.config.concat(changed), config_digest=config.digest())
    )


_SHIFT_DEADLINES = text("""
UPDATE groups SET deadline_at = deadline_at + (now() - stopped.at)
FROM (SELECT at FROM events WHERE entity_id = :run_id AND entity = 'run'
        AND from_state = 'active' ORDER BY seq DESC LIMIT 1) AS stopped
WHERE run_id = :run_id AND state = 'open' AND deadline_at IS NOT NULL
""")


def set_run_state(
    connection: Connection, run: Run, state: RunState, *, reason: str | None = None
) -> None:
    """Move a run; also notes it among the events.

    A run that is started again is judged anew; its clock and its groups' deadlines stood still
    meanwhile.
    """
    advance_clock(connection, run.run_id)
    values: dict[str, Any] = {"state": state, "state_reason": reason}
    if state is RunState.ACTIVE:
        values |= {"judged_finished": 0, "judged_failed": 0}
        connection.execute(_SHIFT_DEADLINES, {"run_id": run.run_id})
    connection.execute(update(runs).where(runs.c.run_id == run.run_id).values(**values))
    record_run_event(connection, run.run_id, run.state, state, reason)


def record_run_event(
    connection: Connection, run_id: UUID, before: str | None, after: str, reason: str | None
) -> None:
    """Note a move of the run among the events."""
    connection.execute(
        text(
            "INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)"
            " VALUES (:run_id, 'run', :run_id, :before, :after, :reason)"
        ),
        {"run_id": run_id, "before": before, "after": after, "reason": reason},
    )


def _new_id(connection: Connection, slug: str) -> UUID:
    """Return another id after each removal of a run of this name (ADR 0027)."""
    first = run_id_of(slug)
    removed = connection.execute(
        text("SELECT count(*) FROM events WHERE entity_id = :first AND to_state = 'removed'"),
        {"first": first},
    ).scalar_one()
    return run_id_of(f"{slug}#{removed}") if removed else first


def _run(row: Row[Any]) -> Run:
    return Run(
        run_id=row.run_id,
        slug=row.slug,
        state=RunState(row.state),
        state_reason=row.state_reason,
        config=RunConfig.stored(row.config),
        policy_version=row.policy_version,
        created_at=row.created_at,
        sealed_at=row.sealed_at,
        origin=RunOrigin.stored(row.config.get("origin") or {}),
    )


def _differences(run: Run, config: RunConfig) -> list[str]:
    # Not by their digests: what was written as 1e2 comes back as 100.
    old, new = run.config.model_dump(mode="json"), config.model_dump(mode="json")
    # What nobody asks for was settled by the first call.
    if config.queue in (DEFAULT_REQUEST_QUEUE, own_queue_of(run.slug)):
        new["queue"] = old["queue"]
    for name in ("base_url", "model"):
        new[name] = old[name] if new[name] is None else new[name]
    return [f"{key} ({old[key]!r} → {new[key]!r})" for key in old if old[key] != new[key]]
