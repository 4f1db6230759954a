"""Logs failed model calls in batches: one line for each endpoint and error code.

Used by `activity.py` on the event loop. The first failure is logged at once, further ones every
ten seconds with their number. Must not: decide whether a call is tried again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

#: Seconds between two lines about the same endpoint and code.
EVERY_S = 10.0


@dataclass(slots=True)
class _Pending:
    logged_at: float
    count: int = 0
    reason: str = ""


class CallWarnings:
    """Counts failures until they are due to be logged.

    Args:
        outlook: The end of each line: whether failed calls are tried again.
    """

    def __init__(self, outlook: str = "") -> None:
        self._outlook = outlook
        self._pending: dict[tuple[str, str], _Pending] = {}

    def note(self, base_url: str, code: str, reason: str, now: float) -> None:
        """Count a failure; the first one of an endpoint and code is logged at once."""
        pending = self._pending.get((base_url, code))
        if pending is None:
            self._pending[base_url, code] = _Pending(logged_at=now)
            self._log(base_url, "a call failed", reason)
            return
        pending.count += 1
        pending.reason = reason
        if now - pending.logged_at >= EVERY_S:
            self._log_pending(base_url, pending, now)

    def flush(self, now: float) -> None:
        """Log failures that are due; drop entries without a failure since their last line."""
        for key, pending in list(self._pending.items()):
            if now - pending.logged_at < EVERY_S:
                continue
            if pending.count:
                self._log_pending(key[0], pending, now)
            else:
                del self._pending[key]

    def _log_pending(self, base_url: str, pending: _Pending, now: float) -> None:
        calls = "1 call" if pending.count == 1 else f"{pending.count} calls"
        failed = f"{calls} failed in the last {now - pending.logged_at:.0f} s"
        self._log(base_url, failed, pending.reason)
        pending.count, pending.logged_at = 0, now

    def _log(self, base_url: str, failed: str, reason: str) -> None:
        log.warning("Model server %s: %s (%s). %s", base_url, failed, reason, self._outlook)
