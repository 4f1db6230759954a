"""A bucket that leaks at a steady pace, kept as one number (GCRA): requests or tokens per minute.

Mirrored by `token_bucket.lua`; used by `memory.py`. Costs and times are seconds: a cost is how long
the bucket needs to earn it. Pure: the caller brings the time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """`full_at` is when all that was taken will have been earned; `None` for a new bucket."""

    full_at: float | None = None

    def earliest(self, cost_s: float, *, tolerance_s: float, now: float) -> float:
        """Say when a call of this cost may start.

        A new bucket is empty but for the first call. A cost above the tolerance waits for a full
        bucket and leaves a debt, so that no call is too large to ever start.
        """
        if self.full_at is None:
            return now
        return max(now, self.full_at + cost_s - max(tolerance_s, cost_s))

    def take(self, cost_s: float, *, at: float, tolerance_s: float) -> None:
        """Book a call that starts at `at`."""
        if self.full_at is None:
            self.full_at = at + max(tolerance_s, cost_s)
        else:
            self.full_at = max(self.full_at, at) + cost_s

    def owe(self, cost_s: float) -> None:
        """Charge afterwards, or refund when negative."""
        if self.full_at is not None:
            self.full_at += cost_s

    def empty(self, *, at: float, tolerance_s: float) -> None:
        """Leave no savings at `at`: after a pause calls start at the steady pace."""
        self.full_at = max(self.full_at or 0.0, at + tolerance_s)
