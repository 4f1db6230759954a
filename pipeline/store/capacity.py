"""How many groups a run may begin now so that none is too old when it is trained.

Used by the dispatcher for runs with `max_staleness` or `groups_per_step`, by the trainer client and
by the status. A group that is begun now is trained after all that are ahead of it, so the number
ahead is bounded by `(max_staleness + 1) * groups_per_step`. Reads only.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from pipeline.contract.train_batch import DEFAULT_GROUPS, DEFAULT_STALENESS
from pipeline.store.runs import Run

# Groups are begun in the order of their numbers, and the rollout with index 0 first. So the groups
# below the first one of which that rollout was never dispatched are begun. A leased step is ahead
# until a later version is published. Steps that are trained and not committed do not count, or a
# trainer that commits every tenth step would stop its own run: these are all but the newest, and
# the one before it if the newest was pulled in advance.
_AHEAD = text("""
WITH policy AS (
    SELECT policy_version AS version,
        EXISTS (SELECT FROM policy_versions WHERE run_id = :run_id) AS is_published
    FROM runs WHERE run_id = :run_id
), leased AS (
    SELECT batch_id, b.policy_version >= p.version AND p.is_published AS is_current,
        p.is_published AND b.policy_version < p.version AS is_trained,
        row_number() OVER (PARTITION BY consumer ORDER BY trainer_step DESC) AS rank
    FROM train_batches b, policy p WHERE run_id = :run_id AND state = 'leased'
)
SELECT (SELECT coalesce(sum(n), 0) FROM group_tallies
        WHERE run_id = :run_id AND state = 'ready') AS ready,
    (SELECT count(*) FROM leased JOIN train_batch_groups USING (batch_id)
     WHERE rank = 1 AND is_trained IS NOT TRUE OR rank = 2 AND is_current) AS leased,
    (SELECT count(*) FROM groups WHERE run_id = :run_id AND state = 'open' AND group_no < coalesce(
        (SELECT group_no FROM rollouts
         WHERE run_id = :run_id AND state = 'queued' AND rollout_index = 0 AND attempt_no = 0
         ORDER BY group_no LIMIT 1), 2147483647)) AS running,
    (SELECT nullif(count(*), 0) FROM train_batch_groups WHERE batch_id = (
        SELECT batch_id FROM train_batches WHERE run_id = :run_id
        ORDER BY leased_at DESC LIMIT 1)) AS last_pull
""")

_FIRST_NOT_ADMITTED = text("""
SELECT group_no FROM rollouts
WHERE run_id = :run_id AND state = 'queued' AND rollout_index = 0 AND attempt_no = 0
ORDER BY group_no OFFSET :admitted LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The groups of a run that are ahead of its trainer, and their bound."""

    ready: int
    leased: int  #: to steps that are not trained yet
    running: int  #: begun and not closed
    max_staleness: int
    groups_per_step: int

    @property
    def most(self) -> int:
        """The largest number of groups ahead with which none gets too old."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def ahead(self) -> int:
        """Groups that are begun and not trained."""
        return self.ready + self.leased + self.running

    @property
    def free(self) -> int:
        """Groups that may be begun now."""
        return max(0, self.most - self.ahead)


def run_capacity(connection: Connection, run: Run) -> Capacity:
    """Return the groups ahead of the trainer, and their bound, counted now."""
    row = connection.execute(_AHEAD, {"run_id": run.run_id}).one()
    config = run.config
    bound = config.max_staleness
    return Capacity(
        ready=int(row.ready),
        leased=row.leased,
        running=row.running,
        max_staleness=DEFAULT_STALENESS if bound is None else bound,
        groups_per_step=config.groups_per_step or row.last_pull or DEFAULT_GROUPS,
    )


def first_not_admitted(connection: Connection, run: Run) -> int | None:
    """Return the number of the first group that may not be begun yet; None: all may be."""
    values = {"run_id": run.run_id, "admitted": run_capacity(connection, run).free}
    return connection.execute(_FIRST_NOT_ADMITTED, values).scalar_one_or_none()
