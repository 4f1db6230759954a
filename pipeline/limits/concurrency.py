"""How many calls may be in flight: a fixed cap, or one that follows the endpoint (AIMD).

Mirrored by `concurrency.lua`; used by `memory.py`. The adaptive cap grows by one per round of calls
while it is used up (doubles per round until the first decrease), and shrinks on 429, timeouts and
grown latency, once per round. Pure: the caller brings the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.limits.ledger import Outcomes
from pipeline.limits.settings import Pace

START, TOP = 64.0, 10_000.0
USED_UP = 0.8  #: of the cap in flight: below this, growing it would mean nothing
ON_CONGESTION, ON_LATENCY = 0.7, 0.9
LATENCY_GROWTH = 2.0  #: mean of a round against the usual, read as congestion
ROUND_MIN_S, ROUND_MIN_CALLS = 0.1, 8


@dataclass(slots=True)
class AdaptiveCap:
    """The cap and what was learnt about latency; 0 means not known yet."""

    cap: float = 0.0
    latency_s: float = 0.0
    usual_s: float = 0.0
    round_sum_s: float = 0.0
    round_calls: int = 0
    round_ends_at: float = 0.0
    calm_at: float = 0.0
    is_steady: bool = False

    def in_force(self, pace: Pace) -> int:
        """Give the cap that holds now; 0 for none."""
        if not pace.adaptive:
            return pace.max_concurrency
        self.cap = min(self.cap or pace.max_concurrency or START, pace.max_concurrency or TOP)
        return math.floor(self.cap)

    def learn(self, outcomes: Outcomes, *, pace: Pace, in_flight: int, now: float) -> None:
        """Adjust the cap to how calls ended; `in_flight` counts them as still running."""
        if outcomes.ok:
            mean_s = outcomes.latency_sum_s / outcomes.ok
            self.latency_s += (mean_s - self.latency_s) * (0.2 if self.latency_s else 1)
            self.round_sum_s += outcomes.latency_sum_s
            self.round_calls += outcomes.ok
        if not pace.adaptive:
            return
        self.in_force(pace)
        has_slowed = self._end_round(now)
        if outcomes.congested or has_slowed:
            self._shrink(ON_CONGESTION if outcomes.congested else ON_LATENCY, now)
        elif outcomes.ok and now >= self.calm_at and in_flight >= USED_UP * self.cap:
            self.cap += outcomes.ok / self.cap if self.is_steady else outcomes.ok
        self.in_force(pace)

    def _round_s(self) -> float:
        return max(self.latency_s, ROUND_MIN_S)

    def _end_round(self, now: float) -> bool:
        """Close the round when it is over; say whether its calls took far longer than usual."""
        if now < self.round_ends_at or self.round_calls < ROUND_MIN_CALLS:
            return False
        mean_s = self.round_sum_s / self.round_calls
        has_slowed = self.usual_s > 0 and mean_s > LATENCY_GROWTH * self.usual_s
        # Quick to believe that the endpoint is fast, slow to get used to it being slow.
        weight = 1.0 if not self.usual_s else 0.5 if mean_s < self.usual_s else 0.05
        self.usual_s += (mean_s - self.usual_s) * weight
        self.round_sum_s, self.round_calls = 0.0, 0
        self.round_ends_at = now + self._round_s()
        return has_slowed

    def _shrink(self, factor: float, now: float) -> None:
        if now < self.calm_at:
            return
        self.cap = max(1.0, self.cap * factor)
        self.is_steady = True
        self.calm_at = now + self._round_s()
