"""How the mock LLM behaves: its latency and its injected errors, as a pure function of a seed.

The mock server uses it for every call. The draws depend on the rollout, the turn and the try, not
on the order of arrival. So two systems that are measured one after the other get the same slow and
failing calls. Must not: read a clock or keep state.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, NamedTuple

_NORMAL = NormalDist()
_UNIT = 1 / 2**64


class CallPlan(NamedTuple):
    """The status and the latency of one call."""

    status: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class MockBehaviour:
    """Latency (lognormal around `latency_ms` when `sigma` > 0), errors, and turns of a rollout.

    With `context_tokens` answers have ids and logprobs like vLLM's, and the conversation has that
    many tokens after its last turn.

    Half of the errors are 429 with `Retry-After`, sent at once as by a rate limiter. The other half
    are 500 after the full latency.
    """

    latency_ms: float = 0.0
    sigma: float = 0.0
    error_rate: float = 0.0
    retry_after_s: float = 1.0
    turns: int = 3
    context_tokens: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.latency_ms < 0 or self.sigma < 0 or self.retry_after_s < 0:
            raise ValueError("latency_ms, sigma and retry_after_s must not be negative")
        if not 0 <= self.error_rate < 1:
            raise ValueError(f"error_rate is {self.error_rate}: give a share from 0 to below 1")
        if self.turns < 1:
            raise ValueError("turns must be at least 1")
        if self.context_tokens and self.context_tokens < 2 * self.turns:
            raise ValueError("context_tokens must be 0, or at least two for each turn")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> MockBehaviour:
        """Build from decoded JSON; an unknown field raises an error that lists the known ones."""
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"unknown {sorted(unknown)}; known are {sorted(known)}")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def decide(self, rollout: str, turn: int, tries: int) -> CallPlan:
        """Return the fate of a rollout's call in turn `turn` after `tries` earlier tries."""
        if not self.sigma and not self.error_rate:
            return CallPlan(200, self.latency_ms / 1000)
        key = f"{self.seed}/{rollout}/{turn}/{tries}".encode()
        digest = blake2b(key, digest_size=16).digest()
        chance = int.from_bytes(digest[:8], "big") * _UNIT
        if chance < self.error_rate / 2:
            return CallPlan(429, 0.0)
        delay_s = self.latency_ms / 1000 * self._factor(digest[8:])
        return CallPlan(500 if chance < self.error_rate else 200, delay_s)

    def _factor(self, random_bytes: bytes) -> float:
        if not self.sigma:
            return 1.0
        # Add half a unit, because inv_cdf is not defined at 0.
        share = (int.from_bytes(random_bytes, "big") + 0.5) * _UNIT
        return math.exp(self.sigma * _NORMAL.inv_cdf(min(share, 1 - 2**-53)))
