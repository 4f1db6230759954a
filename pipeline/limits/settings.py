"""The limits of one endpoint and model, and the pace of calls that follows from them.

Users set `LimitSettings`; the Lua scripts and `Limiter` use `Pace`, the same limits in seconds.
Pure values: reads no clock, no environment and no Redis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Calls are paced at this share of the limit, so that a count over any whole window, ends included,
#: stays at or below the limit.
PACE_FACTOR = 0.99

#: Slots are reserved this many seconds ahead. A longer horizon needs fewer Redis calls, a shorter
#: one reacts sooner to a pause. It is shorter with a concurrency cap, where each slot holds a unit.
HORIZON_S = 0.1
HORIZON_CAPPED_S = 0.05

#: A caller that wakes later than this loses its slot: late calls would bunch up.
LATE_MIN_S, LATE_MAX_S = 0.02, 0.1

Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits in seconds; an interval of 0 means that this kind of limit is not set.

    A tolerance is the burst of a bucket in seconds: its lead over the steady pace.
    """

    request_interval_s: float = 0.0
    request_tolerance_s: float = 0.0
    token_interval_s: float = 0.0
    token_tolerance_s: float = 0.0
    max_concurrency: int = 0
    adaptive: bool = False
    late_s: float = LATE_MAX_S
    horizon_s: float = HORIZON_S

    @property
    def is_rated(self) -> bool:
        """Whether requests or tokens per minute are limited."""
        return self.request_interval_s > 0 or self.token_interval_s > 0

    def merged(self, other: Pace) -> Pace:
        """Return the pace at which callers wait that must pass both."""
        return replace(
            self,
            request_interval_s=max(self.request_interval_s, other.request_interval_s),
            token_interval_s=max(self.token_interval_s, other.token_interval_s),
            late_s=min(self.late_s, other.late_s),
            horizon_s=min(self.horizon_s, other.horizon_s),
        )


class LimitSettings(BaseModel):
    """Limits of one endpoint and model, shared by all worker processes; None means unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Positive | None = Field(
        default=None, description="Calls started per minute."
    )
    tokens_per_minute: Positive | None = Field(
        default=None, description="Prompt and response tokens per minute."
    )
    max_concurrency: Positive | None = Field(default=None, description="Calls in flight at once.")
    burst: Positive | None = Field(
        default=None,
        description="Calls above the steady pace in any second; default: one second's worth.",
    )
    token_burst: Positive | None = Field(
        default=None,
        description="Tokens above the steady pace in any second; default: one second's worth.",
    )
    adaptive: bool = Field(
        default=False,
        description="Let the concurrency cap follow 429s, timeouts and latency, "
        "at most `max_concurrency`.",
    )

    @property
    def is_unlimited(self) -> bool:
        """Whether there is no limit."""
        return not (
            self.requests_per_minute
            or self.tokens_per_minute
            or self.max_concurrency
            or self.adaptive
        )

    def pace(self) -> Pace:
        """Return these limits in seconds.

        In any second at most `limit + burst` calls start. Part of the burst is kept for callers
        that wake late; an idle bucket saves up the rest.
        """
        requests = _per_second(self.requests_per_minute)
        tokens = _per_second(self.tokens_per_minute)
        burst_s = _burst_s(self.burst, requests)
        token_burst_s = _burst_s(self.token_burst, tokens)
        set_bursts = [burst for burst in (burst_s, token_burst_s) if burst > 0]
        late_s = min(max(min(set_bursts, default=1.0) / 2, LATE_MIN_S), LATE_MAX_S)
        is_capped = bool(self.max_concurrency) or self.adaptive
        return Pace(
            request_interval_s=1 / requests if requests else 0.0,
            request_tolerance_s=max(burst_s - late_s, 1 / requests) if requests else 0.0,
            token_interval_s=1 / tokens if tokens else 0.0,
            token_tolerance_s=max(token_burst_s - late_s, 1 / tokens) if tokens else 0.0,
            max_concurrency=self.max_concurrency or 0,
            adaptive=self.adaptive,
            late_s=late_s,
            horizon_s=HORIZON_CAPPED_S if is_capped else HORIZON_S,
        )


def _per_second(per_minute: int | None) -> float:
    return per_minute / 60 * PACE_FACTOR if per_minute else 0.0


def _burst_s(burst: int | None, per_second: float) -> float:
    if not per_second:
        return 0.0
    return (burst or max(1, math.ceil(per_second))) / per_second
