"""The working time of runs: a clock that stops while a run is paused or has no controller.

The reconciler advances the clocks of all runs; a change of state advances the clock of its run.
Read by `status.py`. All times are those of the database.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, text

#: Longest time that one advance adds, so that time without a controller does not count.
MOST_GAP_S = 10.0
#: Seconds between two advances of the same clock.
_EVERY_S = 2.0

# SKIP LOCKED: a run that another transaction has locked is advanced the next time.
_ADVANCE_ALL = text("""
WITH due AS (
    SELECT run_id FROM runs
    WHERE state = 'active' AND worked_at < now() - make_interval(secs => :every_s)
      AND (EXISTS (SELECT FROM rollouts r WHERE r.run_id = runs.run_id AND r.state = 'queued')
           OR EXISTS (SELECT FROM rollouts r WHERE r.run_id = runs.run_id
                      AND r.state IN ('dispatched', 'running')))
    FOR UPDATE SKIP LOCKED
)
UPDATE runs SET worked_at = now(),
    worked_s = worked_s + least(extract(epoch FROM now() - worked_at), :most_s)
FROM due WHERE runs.run_id = due.run_id
""")

_ADVANCE = text("""
UPDATE runs SET worked_at = now(),
    worked_s = worked_s + CASE WHEN state = 'active'
        THEN least(extract(epoch FROM now() - worked_at), :most_s) ELSE 0 END
WHERE run_id = :run_id
""")


def advance_clocks(connection: Connection) -> None:
    """Advance the clocks of active runs with open rollouts."""
    connection.execute(_ADVANCE_ALL, {"every_s": _EVERY_S, "most_s": MOST_GAP_S})


def advance_clock(connection: Connection, run_id: UUID) -> None:
    """Advance the clock of a run before its state changes."""
    connection.execute(_ADVANCE, {"run_id": run_id, "most_s": MOST_GAP_S})


def elapsed_s(worked_s: float, since_s: float | None) -> float:
    """Return a run's working time.

    Args:
        worked_s: The clock of the run.
        since_s: Time from the last advance to now, or to the last outcome; None if it is stopped.
    """
    return worked_s + min(max(0.0, since_s or 0.0), MOST_GAP_S)
