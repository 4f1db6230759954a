"""Requested rescores: asked for by `rollout rescore`, claimed to be published, ended by a verdict.

Each is a row, so that a request survives the command and the broker. Rows are locked in order of
their rollouts, after all other rows. Must not: publish, or record scores.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import ErrorClass
from pipeline.store.engine import RESCORED_CHANNEL, notify
from pipeline.store.rescorable import RESCORABLE, StoredTrajectory, read_rescorable
from pipeline.store.runs import Run, get_run

#: Requests for one trajectory that are published before it counts as lost.
_MOST_TRIES = 5


_REQUEST = (
    """
INSERT INTO rescores (rollout_id, reward, run_id, queue, awaited)
SELECT r.rollout_id, :reward, :run_id, :queue, :awaited
"""
    + RESCORABLE
    + """
ORDER BY r.rollout_id
ON CONFLICT (rollout_id, reward) DO UPDATE SET queue = excluded.queue, tries = 0,
    awaited = excluded.awaited, lease_until = '-infinity', verdict = NULL, reason = NULL
"""
)


def request_rescores(
    connection: Connection,
    run: Run,
    reward: str,
    *,
    error_class: ErrorClass | None,
    queue: str,
    awaited: bool,
) -> int:
    """Ask for the trajectories of a run to be scored again; return how many.

    A second call asks again for all of them.

    Args:
        connection: An open transaction.
        run: The run.
        reward: Name of the reward that scores them.
        error_class: Only rollouts that failed with this class.
        queue: The queue of the workers that score them.
        awaited: Keep each verdict until `end_rescores`.
    """
    values = {"run_id": run.run_id, "error_class": error_class, "reward": reward}
    return connection.execute(
        text(_REQUEST), values | {"queue": queue, "awaited": awaited}
    ).rowcount


class ClaimedRescore(NamedTuple):
    """A requested rescore that is to be published."""

    run: Run
    reward: str
    queue: str
    trajectory: StoredTrajectory


_CLAIM = text("""
WITH picked AS (
    SELECT rollout_id, reward FROM rescores
    WHERE verdict IS NULL AND lease_until < now()
      AND (CAST(:only AS uuid[]) IS NULL OR run_id = ANY(:only))
    ORDER BY lease_until, rollout_id
    LIMIT least(:most, :most_in_flight - (SELECT count(*) FROM rescores
                                          WHERE verdict IS NULL AND lease_until >= now()))
    FOR UPDATE SKIP LOCKED
)
UPDATE rescores s SET tries = s.tries + 1,
    lease_until = now() + make_interval(secs => :lease_s * (s.tries + 1))
FROM picked WHERE s.rollout_id = picked.rollout_id AND s.reward = picked.reward
RETURNING s.rollout_id, s.reward, s.run_id, s.queue, s.tries
""")

_SLUG = text("SELECT slug FROM runs WHERE run_id = :run_id")


def claim_rescores(
    connection: Connection,
    *,
    only: Collection[UUID] | None,
    most: int,
    most_in_flight: int,
    lease_s: float,
) -> list[ClaimedRescore]:
    """Claim requested rescores that are due: never published, or without a verdict for too long.

    Args:
        connection: An open transaction; publish only after it is committed.
        only: Only of these runs; None: of all.
        most: Upper bound.
        most_in_flight: Upper bound of all requests without a verdict.
        lease_s: Wait for the verdict, the second time twice as long, and so on.
    """
    values = {"most": most, "most_in_flight": most_in_flight, "lease_s": lease_s}
    rows = connection.execute(_CLAIM, values | {"only": None if only is None else list(only)}).all()
    claimed: list[ClaimedRescore] = []
    lost: list[Any] = []
    for run_id, rows_of_run in groupby(sorted(rows, key=lambda r: r.run_id), lambda r: r.run_id):
        due = {(row.rollout_id, row.reward): row for row in rows_of_run}
        run = get_run(connection, connection.execute(_SLUG, {"run_id": run_id}).scalar_one())
        ids = [rollout_id for rollout_id, _ in due]
        found = {each.rollout_id: each for each in read_rescorable(connection, run, ids=ids)}
        for (rollout_id, reward), row in due.items():
            if rollout_id in found and row.tries <= _MOST_TRIES:
                claimed.append(ClaimedRescore(run, reward, row.queue, found[rollout_id]))
            else:
                lost.append(row)
    record_verdicts(
        connection,
        [
            (row.rollout_id, row.reward, "failed", "no worker answered, or it has changed")
            for row in lost
        ],
    )
    return claimed


_RELEASE = text("""
UPDATE rescores s SET lease_until = '-infinity', tries = greatest(0, tries - 1)
FROM (SELECT rollout_id, reward FROM rescores
      JOIN unnest(CAST(:ids AS uuid[]), CAST(:rewards AS text[])) AS given (id, name)
          ON rollout_id = id AND reward = name
      ORDER BY rollout_id FOR UPDATE OF rescores) AS locked
WHERE s.rollout_id = locked.rollout_id AND s.reward = locked.reward
""")


def release_rescores(connection: Connection, claimed: Sequence[ClaimedRescore]) -> None:
    """Make claimed rescores due again that could not be published."""
    connection.execute(
        _RELEASE,
        {
            "ids": [each.trajectory.rollout_id for each in claimed],
            "rewards": [each.reward for each in claimed],
        },
    )


def fail_rescores(
    connection: Connection, claimed: Sequence[ClaimedRescore], *, reason: str
) -> None:
    """End rescores that cannot be published."""
    record_verdicts(
        connection,
        [(each.trajectory.rollout_id, each.reward, "failed", reason) for each in claimed],
    )


_END = text("""
WITH locked AS (
    SELECT s.rollout_id, s.reward, s.awaited, given.verdict, given.reason
    FROM rescores s
    JOIN unnest(CAST(:ids AS uuid[]), CAST(:rewards AS text[]), CAST(:verdicts AS text[]),
                CAST(:reasons AS text[])) AS given (id, name, verdict, reason)
        ON s.rollout_id = id AND s.reward = name
    WHERE s.verdict IS NULL ORDER BY s.rollout_id FOR UPDATE OF s
), ended AS (
    DELETE FROM rescores s USING locked l
    WHERE s.rollout_id = l.rollout_id AND s.reward = l.reward AND NOT l.awaited
)
UPDATE rescores s SET verdict = l.verdict, reason = l.reason
FROM locked l WHERE s.rollout_id = l.rollout_id AND s.reward = l.reward AND l.awaited
""")


def record_verdicts(
    connection: Connection, verdicts: Sequence[tuple[UUID, str, str, str | None]]
) -> None:
    """Record how requested rescores ended: rollout, reward, `scored` or `failed`, reason."""
    if not verdicts:
        return
    ids, rewards, ends, reasons = zip(*verdicts, strict=True)
    connection.execute(
        _END,
        {
            "ids": list(ids),
            "rewards": list(rewards),
            "verdicts": list(ends),
            "reasons": list(reasons),
        },
    )
    notify(connection, RESCORED_CHANNEL)


class RescoreCount(NamedTuple):
    """The requested rescores of a run by one reward."""

    scored: int
    failed: int
    waiting: int
    reason: str | None  #: why one of the failed ones has no value


_COUNT = text("""
SELECT count(*) FILTER (WHERE verdict = 'scored'), count(*) FILTER (WHERE verdict = 'failed'),
       count(*) FILTER (WHERE verdict IS NULL), min(reason)
FROM rescores WHERE run_id = :run_id AND reward = :reward
""")

_DELETE = text("""
DELETE FROM rescores s USING (
    SELECT rollout_id FROM rescores
    WHERE run_id = :run_id AND reward = :reward AND (verdict IS NOT NULL OR :all)
    ORDER BY rollout_id FOR UPDATE
) AS locked WHERE s.rollout_id = locked.rollout_id AND s.reward = :reward
""")

_STOP_AWAITING = text("""
UPDATE rescores s SET awaited = false FROM (
    SELECT rollout_id FROM rescores WHERE run_id = :run_id AND reward = :reward
    ORDER BY rollout_id FOR UPDATE
) AS locked WHERE s.rollout_id = locked.rollout_id AND s.reward = :reward
""")


def count_rescores(connection: Connection, run: Run, reward: str) -> RescoreCount:
    """Return the numbers of requested rescores by their verdict."""
    row = connection.execute(_COUNT, {"run_id": run.run_id, "reward": reward}).one()
    return RescoreCount(*row)


def end_rescores(connection: Connection, run: Run, reward: str, *, keep_open: bool) -> None:
    """Delete requested rescores that no command waits for any more.

    Args:
        connection: An open transaction.
        run: The run.
        reward: The reward.
        keep_open: Keep the ones without a verdict, which the dispatcher still publishes.
    """
    values = {"run_id": run.run_id, "reward": reward}
    connection.execute(_DELETE, values | {"all": not keep_open})
    if keep_open:
        connection.execute(_STOP_AWAITING, values)
