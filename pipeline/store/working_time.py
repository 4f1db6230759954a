"""How long runs were worked on: a clock that stands still while a run is paused or nobody works.

The reconciler advances the clocks of all runs; a run's own is advanced when its state changes.
Read by `status.py`. Database clock only.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, text

#: Longest time that one advance adds: without a controller the clock stands still.
MOST_GAP_S = 10.0
#: Seconds between two advances of the same clock.
_EVERY_S = 2.0

# What another transaction has locked is advanced the next time: nobody waits here.
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
    """Advance the clocks of the active runs that have something left to do."""
    connection.execute(_ADVANCE_ALL, {"every_s": _EVERY_S, "most_s": MOST_GAP_S})


def advance_clock(connection: Connection, run_id: UUID) -> None:
    """Advance a run's clock before its state changes; what was no working time is passed over."""
    connection.execute(_ADVANCE, {"run_id": run_id, "most_s": MOST_GAP_S})


def elapsed_s(worked_s: float, since_s: float | None) -> float:
    """Return a run's working time.

    Args:
        worked_s: As the clock says.
        since_s: From the last advance to now, or to the run's last outcome; None: it stands still.
    """
    return worked_s + min(max(0.0, since_s or 0.0), MOST_GAP_S)
