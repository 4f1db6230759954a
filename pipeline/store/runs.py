"""Runs in the store: created once, found by slug, paused, cancelled, listed.

Used by producers, services, trainer client and command line. Must not: know the broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from pipeline.contract.errors import NotAllowed, NotFound
from pipeline.contract.policy import Policy
from pipeline.contract.rollout import RunState, run_id_of
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE, RunConfig, RunOrigin, own_queue_of
from pipeline.store.working_time import advance_clock

_CREATE = text("""
INSERT INTO runs (run_id, slug, config) VALUES (:run_id, :slug, :config) ON CONFLICT DO NOTHING
""").bindparams(bindparam("config", type_=JSONB))

_COLUMNS = """
run_id, slug, state, state_reason, config, policy_version, created_at, sealed_at, (
    SELECT jsonb_build_object('run_id', p.run_id, 'version', p.version, 'serial', p.serial,
                              'mode', p.mode, 'endpoints', coalesce(p.endpoints, '[]'))
    FROM policy_versions p WHERE p.run_id = runs.run_id AND p.version = runs.policy_version
) AS policy
"""

_GET = text(f"SELECT {_COLUMNS} FROM runs WHERE slug = :slug")

_FIND = text(f"""
SELECT {_COLUMNS} FROM runs WHERE starts_with(slug, :slug) OR :slug = '@last'
ORDER BY slug = :slug DESC, created_at DESC, slug LIMIT 6
""")

_LIST = text(f"SELECT {_COLUMNS} FROM runs ORDER BY created_at DESC LIMIT :limit")

_WITH_QUEUED = text(f"""
SELECT {_COLUMNS} FROM runs
WHERE state = 'active'
  AND EXISTS (SELECT FROM rollouts r WHERE r.run_id = runs.run_id AND r.state = 'queued')
""")

_LOCK = text("SELECT FROM runs WHERE run_id = :run_id FOR NO KEY UPDATE")

_IDS = text("SELECT run_id FROM runs WHERE slug = ANY(:slugs)")

_MOVE = text("""
UPDATE runs SET config = config || :changed WHERE run_id = :run_id
""").bindparams(bindparam("changed", type_=JSONB))

_SET_STATE = text("""
WITH moved AS (
    UPDATE runs SET state = :state, state_reason = :reason,
        judged_finished = CASE WHEN :restarts THEN 0 ELSE judged_finished END,
        judged_failed = CASE WHEN :restarts THEN 0 ELSE judged_failed END
    WHERE run_id = :run_id
)
INSERT INTO events (run_id, entity, entity_id, from_state, to_state, reason)
VALUES (:run_id, 'run', :run_id, :before, :state, :reason)
""")

_COUNT_REMOVALS = text(
    "SELECT count(*) FROM events WHERE entity_id = :run_id AND to_state = 'removed'"
)


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
    policy: Policy | None = None  #: the one that was published last
    origin: RunOrigin = field(default_factory=RunOrigin)


def create_run(
    connection: Connection, slug: str, config: RunConfig, *, origin: RunOrigin | None = None
) -> Run:
    """Create the run, or return the run of this slug if its configuration is the same.

    A run keeps the origin of the call that created it.

    Raises:
        NotAllowed: A run of this slug exists with another configuration.
    """
    # The origin is stored beside the configuration, and two calls may differ in it.
    stored = config.model_dump(mode="json") | {
        "origin": (origin or RunOrigin()).model_dump(mode="json")
    }
    connection.execute(
        _CREATE, {"run_id": _new_id(connection, slug), "slug": slug, "config": stored}
    )
    run = get_run(connection, slug)
    if differences := _differences(run, config):
        raise NotAllowed(
            f"Run {slug} exists with another configuration.",
            why=f"The differences are: {', '.join(differences)}.",
            remedy="Choose another name with --run, or repeat the options of the first call.",
        )
    return run


def get_run(connection: Connection, slug: str) -> Run:
    """Return the run with exactly this slug.

    Raises:
        NotFound: There is no such run.
    """
    found = connection.execute(_GET, {"slug": slug}).one_or_none()
    if found is None:
        raise NotFound(f"There is no run {slug!r}.", remedy="See: rollout runs")
    return _run(found)


def find_run(connection: Connection, name: str) -> Run:
    """Return the run that an operator means: by its slug, a unique beginning of it, or `@last`.

    Raises:
        NotFound: No run has this name, or several runs could be meant.
    """
    found = connection.execute(_FIND, {"slug": name}).all()
    if not found:
        raise NotFound(f"There is no run {name!r}.", remedy="See: rollout runs")
    if len(found) == 1 or name in ("@last", found[0].slug):
        return _run(found[0])
    names = ", ".join(row.slug for row in found[:5])
    raise NotFound(f"{name!r} could be several runs: {names}.", remedy="Name one of them.")


def lock_run(connection: Connection, run: Run) -> Run:
    """Lock the row of a run, the last lock of a transaction, and return it as it is now."""
    connection.execute(_LOCK, {"run_id": run.run_id})
    return get_run(connection, run.slug)


def list_runs(connection: Connection, *, limit: int = 100) -> list[Run]:
    """Return the newest runs first."""
    return [_run(row) for row in connection.execute(_LIST, {"limit": limit})]


def active_runs(connection: Connection) -> list[Run]:
    """Return the runs with queued rollouts that may be dispatched, highest priority first."""
    found = [_run(row) for row in connection.execute(_WITH_QUEUED)]
    return sorted(found, key=lambda run: (-run.config.priority, run.created_at))


def ids_of(connection: Connection, slugs: Sequence[str]) -> frozenset[UUID]:
    """Return the ids of those runs that exist."""
    return frozenset(connection.execute(_IDS, {"slugs": list(slugs)}).scalars())


def move_run(connection: Connection, run: Run, config: RunConfig) -> None:
    """Give a run the endpoint of this configuration; requests already sent keep the old one."""
    changed = config.model_dump(mode="json", include={"base_url"})
    connection.execute(_MOVE, {"run_id": run.run_id, "changed": changed})


def set_run_state(
    connection: Connection, run: Run, state: RunState, *, reason: str | None = None
) -> None:
    """Set the state of a run and record the event.

    When a run is started again, its error counts begin at zero.
    """
    advance_clock(connection, run.run_id)
    values = {"run_id": run.run_id, "before": run.state, "state": state, "reason": reason}
    connection.execute(_SET_STATE, values | {"restarts": state is RunState.ACTIVE})


def require_not_cancelled(run: Run) -> None:
    """Check that a locked run accepts changes, which a cancelled one does not.

    Raises:
        NotAllowed: The run is cancelled.
    """
    if run.state is RunState.CANCELLED:
        raise NotAllowed(
            f"Run {run.slug} is cancelled.",
            remedy="Choose another name with --run, or take it up again: "
            f"rollout retry {run.slug} --cancelled",
        )


def _new_id(connection: Connection, slug: str) -> UUID:
    """Return another id after each removal of a run of this name (ADR 0027)."""
    first = run_id_of(slug)
    removed = connection.execute(_COUNT_REMOVALS, {"run_id": first}).scalar_one()
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
        policy=None if row.policy is None else Policy.model_validate(row.policy),
        origin=RunOrigin.stored(row.config.get("origin") or {}),
    )


def _differences(run: Run, config: RunConfig) -> list[str]:
    # As JSON values: a number written as 1e2 comes back from the store as 100.
    old, new = run.config.model_dump(mode="json"), config.model_dump(mode="json")
    # A field that this call leaves open has the value of the first call.
    if config.queue in (DEFAULT_REQUEST_QUEUE, own_queue_of(run.slug)):
        new["queue"] = old["queue"]
    for name in ("base_url", "model"):
        new[name] = old[name] if new[name] is None else new[name]
    return [f"{key} ({old[key]!r} → {new[key]!r})" for key in old if old[key] != new[key]]
