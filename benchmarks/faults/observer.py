"""Queries the store repeatedly during a run, and keeps the first version of each outcome.

An accepted outcome must still be there, unchanged, at the end. So the observer compares later rows
with the first version. Must not: write.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

_EVERY_S = 0.4
_SHARE = 10  #: ratio of the pause to the duration of a query

_ACCEPTED = text("""
SELECT r.rollout_id, r.state, r.winner_attempt_no, r.reward
FROM rollouts r JOIN runs USING (run_id)
WHERE slug = :slug AND r.state IN ('succeeded', 'failed', 'cancelled')
""")

_TRAJECTORIES = text("""
SELECT t.rollout_id, t.attempt_no, md5(coalesce(t.body, '') || convert_to(coalesce(t.body_uri, ''),
       'UTF8')) AS digest
FROM trajectories t JOIN rollouts r USING (rollout_id) JOIN runs ON runs.run_id = r.run_id
WHERE slug = :slug
""")


class StoreObserver(threading.Thread):
    """Records outcomes and trajectories when they are first seen, and every later change."""

    def __init__(self, engine: Engine, slug: str) -> None:
        super().__init__(name=f"observer-{slug}", daemon=True)
        self._engine = engine
        self._slug = slug
        self._stopping = threading.Event()
        self._seen: dict[Any, Any] = {}
        self.changes: list[str] = []

    def run(self) -> None:
        """Query until stopped; slow queries are made less often, because they load the store."""
        pause_s = _EVERY_S
        while not self._stopping.wait(pause_s):
            started = time.monotonic()
            self._compare()
            pause_s = max(_EVERY_S, _SHARE * (time.monotonic() - started))

    def stop(self) -> None:
        """Query a last time and end."""
        if not self._stopping.is_set():
            self._stopping.set()
            self.join()
            self._compare()

    def _compare(self) -> None:
        values = {"slug": self._slug}
        try:
            with self._engine.connect() as connection:
                outcomes = connection.execute(_ACCEPTED, values).all()
                digests = connection.execute(_TRAJECTORIES, values).all()
        except DBAPIError:
            return  # a fault is stopping the store
        found = {("outcome", row[0]): tuple(row[1:]) for row in outcomes}
        found |= {("trajectory", row[0], row[1]): row[2] for row in digests}
        for key, before in self._seen.items():
            if found.get(key) != before:
                self.changes.append(f"{key} was {before} and is {found.get(key)}")
        self._seen = found
