"""The accounting of a run: its groups by state, and the check that its rows agree.

`rollout status` shows the groups. `rollout db check` checks the rows, and tests do so after every
scenario. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from pipeline.contract.errors import AccountingBroken
from pipeline.contract.rollout import GroupState
from pipeline.store.run_counters import COUNTER_RULES
from pipeline.store.runs import Run

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Accounting:
    """The groups of a run by state; the parts add up to `enqueued`."""

    enqueued: int
    open: int
    ready: int
    leased: int
    consumed: int
    dropped: dict[str, int]  #: by reason
    rollouts: int
    cut: int  #: rollouts cancelled because their group had enough, or its time was over

    @property
    def adds_up(self) -> bool:
        """Whether each group is in exactly one state."""
        parts = self.open + self.ready + self.leased + self.consumed + sum(self.dropped.values())
        return parts == self.enqueued

    @property
    def cut_share(self) -> float:
        """Share of the rollouts that were cut."""
        return self.cut / self.rollouts if self.rollouts else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the sums as `rollout status --json` shows them."""
        parts = {name: getattr(self, name) for name in ("consumed", "leased", "ready", "open")}
        return {
            "enqueued": self.enqueued,
            **parts,
            "dropped": self.dropped,
            "adds_up": self.adds_up,
            "rollouts_cut": self.cut,
        }

    def __str__(self) -> str:
        parts = [
            f"{getattr(self, name)} {name}" for name in ("consumed", "leased", "ready", "open")
        ]
        parts += [f"{n} dropped ({reason})" for reason, n in sorted(self.dropped.items())]
        return f"{self.enqueued} enqueued = {' + '.join(parts)}"


_GROUPS = text("""
SELECT runs.next_group_no AS enqueued, g.state, g.drop_reason, coalesce(sum(g.n), 0) AS n,
       coalesce(sum(g.n_rollouts), 0) AS rollouts, coalesce(sum(g.n_cut), 0) AS cut
FROM runs LEFT JOIN group_tallies g USING (run_id) WHERE run_id = :run_id
GROUP BY runs.next_group_no, g.state, g.drop_reason
""")


def account(connection: Connection, run_id: UUID) -> Accounting:
    """Return the groups of a run by state."""
    rows = connection.execute(_GROUPS, {"run_id": run_id}).all()
    by_state = {
        state: sum(int(row.n) for row in rows if row.state == state) for state in GroupState
    }
    return Accounting(
        enqueued=rows[0].enqueued if rows else 0,
        open=by_state[GroupState.OPEN],
        ready=by_state[GroupState.READY],
        leased=by_state[GroupState.LEASED],
        consumed=by_state[GroupState.CONSUMED],
        dropped={
            row.drop_reason or "unknown": int(row.n)
            for row in rows
            if row.state == GroupState.DROPPED and row.n
        },
        rollouts=sum(int(row.rollouts) for row in rows),
        cut=sum(int(row.cut) for row in rows),
    )


#: Each query returns one sentence for each violation of its rule.
_RULES = {
    "group counters equal their rows": """
        SELECT format('group g%s says %s of %s rollouts ended well, %s failed, %s cancelled; '
                      'its rows say %s of %s, %s, %s', lpad(g.group_no::text, 6, '0'),
                      g.n_succeeded, g.n_rollouts, g.n_failed, g.n_cancelled, r.s, r.n, r.f, r.c)
        FROM groups g JOIN (
            SELECT group_id, count(*) AS n, count(*) FILTER (WHERE state = 'succeeded') AS s,
                   count(*) FILTER (WHERE state = 'failed') AS f,
                   count(*) FILTER (WHERE state = 'cancelled') AS c
            FROM rollouts WHERE run_id = :run_id GROUP BY group_id) AS r USING (group_id)
        WHERE (g.n_rollouts, g.n_succeeded, g.n_failed, g.n_cancelled)
              IS DISTINCT FROM (r.n, r.s, r.f, r.c)""",
    "every group has its rollouts": """
        SELECT format('group %s has no rollouts', group_no) FROM groups g WHERE run_id = :run_id
          AND NOT EXISTS (SELECT FROM rollouts r WHERE r.group_id = g.group_id)""",
    "a closed group has no open rollout, an open one has some": """
        SELECT format('group %s is %s with %s of %s rollouts terminal', group_no, state,
                      n_succeeded + n_failed + n_cancelled, n_rollouts)
        FROM groups WHERE run_id = :run_id
          AND (state = 'open') = (n_succeeded + n_failed + n_cancelled = n_rollouts)""",
    "a group for the trainer has enough usable rollouts": """
        SELECT format('group %s is %s with %s usable rollouts, of %s at least and %s at most',
                      group_no, state, n_succeeded, n_min, n_target)
        FROM groups WHERE run_id = :run_id AND state IN ('ready', 'leased', 'consumed')
          AND n_succeeded NOT BETWEEN n_min AND n_target""",
    "a dropped group has a reason, no other has one": """
        SELECT format('group %s is %s with the reason %s', group_no, state, drop_reason)
        FROM groups WHERE run_id = :run_id AND (state = 'dropped') <> (drop_reason IS NOT NULL)""",
    "leased and consumed groups are in exactly one batch of that kind": """
        SELECT format('group %s is %s and in %s leased, %s committed batches', g.group_no, g.state,
                      b.leased, b.committed)
        FROM groups g CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE t.state = 'leased') AS leased,
                   count(*) FILTER (WHERE t.state = 'committed') AS committed
            FROM train_batch_groups m JOIN train_batches t USING (batch_id)
            WHERE m.group_id = g.group_id) AS b
        WHERE g.run_id = :run_id AND (b.leased, b.committed) IS DISTINCT FROM
            (CAST(g.state = 'leased' AS integer), CAST(g.state = 'consumed' AS integer))""",
    "only a succeeded rollout has a reward and a winner": """
        SELECT format('rollout %s is %s with reward %s of attempt %s', rollout_id, state, reward,
                      winner_attempt_no)
        FROM rollouts WHERE run_id = :run_id
          AND (state = 'succeeded') <> (winner_attempt_no IS NOT NULL)
           OR (run_id = :run_id AND state <> 'succeeded' AND reward IS NOT NULL)""",
    "a rollout has tokens where the trajectory of its winner has them": """
        SELECT format('rollout %s: %s', rollout_id, has_tokens)
        FROM rollouts r LEFT JOIN trajectories t USING (rollout_id)
        WHERE r.run_id = :run_id AND t.attempt_no = r.winner_attempt_no
          AND r.has_tokens <> (t.tokens IS NOT NULL OR t.tokens_uri IS NOT NULL)""",
    "a failed rollout has an error class": """
        SELECT format('rollout %s failed without a class', rollout_id)
        FROM rollouts WHERE run_id = :run_id AND state = 'failed' AND error_class IS NULL""",
    "an attempt under way belongs to a rollout under way": """
        SELECT format('attempt %s of rollout %s is %s, the rollout %s with attempt %s',
                      a.attempt_no, rollout_id, a.state, r.state, r.attempt_no)
        FROM attempts a JOIN rollouts r USING (rollout_id)
        WHERE a.run_id = :run_id AND a.state IN ('dispatched', 'running')
          AND (r.state NOT IN ('dispatched', 'running') OR r.attempt_no <> a.attempt_no)""",
    "a rollout under way has an attempt under way": """
        SELECT format('rollout %s is %s without an attempt', rollout_id, r.state)
        FROM rollouts r WHERE r.run_id = :run_id AND r.state IN ('dispatched', 'running')
          AND NOT EXISTS (SELECT FROM attempts a WHERE a.rollout_id = r.rollout_id
                          AND a.attempt_no = r.attempt_no AND a.state IN ('dispatched', 'running'))
        """,
    **COUNTER_RULES,
}


def require_accounting(connection: Connection, run: Run) -> None:
    """Check every rule of a run; it takes seconds for a million rollouts.

    Raises:
        AccountingBroken: Rows of the run contradict each other.
    """
    found = check_accounting(connection, run.run_id)
    if found:
        shown = "".join(f"\n- {sentence}" for sentence in found[:_MOST_SHOWN])
        raise AccountingBroken(
            f"Rows of the run {run.slug} contradict each other in {len(found)} places:{shown}\n",
            remedy="Restore the database from a backup, or report the bug with these lines.",
        )


def check_accounting(connection: Connection, run_id: UUID) -> list[str]:
    """Return one sentence for each violated rule; empty if there is none."""
    return list(_violations(connection, run_id))


def _violations(connection: Connection, run_id: UUID) -> Iterator[str]:
    sums = account(connection, run_id)
    if not sums.adds_up:
        yield f"The groups do not add up: {sums}."
    for rule, query in _RULES.items():
        for sentence in connection.execute(text(query), {"run_id": run_id}).scalars():
            yield f"{rule}: {sentence}"
