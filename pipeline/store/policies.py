"""The published policies of runs: version, endpoints and mode, in the order of their publication.

Used by the trainer client and `rollout policy`; the dispatcher reads the current one with its run.
Must not: notify workers; the dispatcher does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from pipeline.contract.errors import NotAllowed, NotFound
from pipeline.contract.policy import Policy, PolicyMode
from pipeline.store.engine import WORK_CHANNEL, notify
from pipeline.store.runs import Run, lock_run, require_not_cancelled

E_BACKWARDS = "E136"

_PUBLISH = text("""
WITH published AS (
    INSERT INTO policy_versions AS p (run_id, version, endpoints, weights_uri, mode, serial)
    VALUES (:run_id, :version, :endpoints, :uri, :mode, :serial)
    ON CONFLICT (run_id, version) DO UPDATE SET endpoints = excluded.endpoints,
        weights_uri = coalesce(excluded.weights_uri, p.weights_uri), mode = excluded.mode,
        serial = excluded.serial, published_at = now()
)
UPDATE runs SET policy_version = :version WHERE run_id = :run_id
""").bindparams(bindparam("endpoints", type_=JSONB))

_URI = text("""
SELECT weights_uri FROM policy_versions WHERE run_id = :run_id AND version = :version
""")

_LIST = text("""
SELECT version, endpoints, weights_uri, mode, published_at FROM policy_versions
WHERE run_id = :run_id ORDER BY version DESC LIMIT :most
""")

_PUBLISHED_AT = text("""
SELECT published_at FROM policy_versions WHERE run_id = :run_id AND version = :version
""")

_BEGUN_BEFORE = text("""
SELECT g.group_id FROM groups g WHERE g.run_id = :run_id AND g.state = 'open' AND EXISTS (
    SELECT FROM rollouts r
    JOIN attempts a ON a.rollout_id = r.rollout_id AND a.attempt_no = r.attempt_no
    WHERE r.group_id = g.group_id AND a.dispatched_at < :published_at)
""")

# Runs with attempts in flight, by the partial index of those.
_IN_USE = text("""
SELECT run_id, version, serial, mode, coalesce(endpoints, '[]') AS endpoints
FROM runs JOIN policy_versions p USING (run_id)
WHERE p.version = runs.policy_version AND runs.state <> 'cancelled'
  AND EXISTS (SELECT FROM rollouts r
              WHERE r.run_id = runs.run_id AND r.state IN ('dispatched', 'running'))
""")


class PublishedPolicy(NamedTuple):
    """One version of a run's policy."""

    version: int
    endpoints: tuple[str, ...]
    uri: str | None
    mode: str
    published_at: datetime


def publish_policy(
    connection: Connection,
    run: Run,
    version: int,
    *,
    endpoints: Sequence[str] = (),
    uri: str | None = None,
    mode: PolicyMode = "keep",
) -> bool:
    """Make this version the current one of a run; return whether anything changed.

    The same publication again changes nothing. The current version may be published again with
    another mode or other endpoints. Without endpoints those of the version before stay.

    Raises:
        NotAllowed: A later version was published before, or the run is cancelled.
    """
    current = lock_run(connection, run)
    require_not_cancelled(current)
    known = current.policy
    if known is not None and version < known.version:
        raise NotAllowed(
            f"Version {version} of run {run.slug} cannot be published.",
            why=f"Version {known.version} was published before, and versions only ascend.",
            remedy="Weights that are trained again after a rewind are new: number them from "
            f"{known.version + 1} on.",
            code=E_BACKWARDS,
        )
    urls = list(endpoints) or (list(known.endpoints) if known else [])
    if known is not None and (known.version, known.mode) == (version, mode):
        stored = connection.execute(_URI, {"run_id": run.run_id, "version": version}).scalar_one()
        if list(known.endpoints) == urls and uri in (None, stored):
            return False
    values = {
        "run_id": run.run_id,
        "version": version,
        "endpoints": urls,
        "uri": uri,
        "mode": mode,
        "serial": known.serial + 1 if known else 1,
    }
    connection.execute(_PUBLISH, values)
    notify(connection, WORK_CHANNEL)
    return True


def list_policies(connection: Connection, run_id: UUID, *, most: int) -> list[PublishedPolicy]:
    """Return the published versions of a run, newest first."""
    rows = connection.execute(_LIST, {"run_id": run_id, "most": most})
    return [
        PublishedPolicy(
            row.version, tuple(row.endpoints or ()), row.weights_uri, row.mode, row.published_at
        )
        for row in rows
    ]


def groups_begun_before(connection: Connection, run: Run, version: int) -> list[UUID]:
    """Return the open groups with a rollout that was dispatched before a version was published.

    Raises:
        NotFound: This version was never published.
    """
    values: dict[str, Any] = {"run_id": run.run_id, "version": version}
    published_at = connection.execute(_PUBLISHED_AT, values).scalar_one_or_none()
    if published_at is None:
        raise NotFound(
            f"Version {version} of run {run.slug} was never published.",
            remedy=f"The published ones: rollout policy list {run.slug}",
        )
    values["published_at"] = published_at
    return list(connection.execute(_BEGUN_BEFORE, values).scalars())


def policies_in_use(connection: Connection) -> list[Policy]:
    """Return the current policies of all runs that have attempts in flight."""
    return [Policy.model_validate(row) for row in connection.execute(_IN_USE).mappings()]
