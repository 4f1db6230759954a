"""The results of a campaign: figures and violations by phase.

The campaign fills them, and the report prints them. Must not: leave out a violation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.figures import Figures

CALM = "no fault"
STORM = "C1-C10, C12, C14-C17, one after the other"
DRAIN = "C2 with 500 in flight"
TWICE = "C11 everything twice, late, out of order"
TWICE_STORED = "C11 with all bodies in the payload store"
HARM = "C12 poison, C13 blocked loops"
LIMITED = "C15 storm under a shared limit"
KILL = "C1 with production's lease, no restart"

#: Phases outside the sums: without faults, or with another lease.
_APART = (CALM, KILL)


@dataclass(slots=True)
class Phase:
    """One phase of the campaign and its results."""

    name: str
    figures: Figures
    violations: list[str]
    lease_s: float


@dataclass(slots=True)
class Campaign:
    """The results of all phases."""

    broker: str
    seed: int
    rollouts: int
    lease_s: float
    phases: list[Phase] = field(default_factory=list)
    trainer_deaths: int = 0

    @property
    def violations(self) -> list[str]:
        """All violations of the invariants."""
        return [violation for phase in self.phases for violation in phase.violations]

    @property
    def figures(self) -> Figures:
        """The sum over all phases with faults and the short lease."""
        return sum((p.figures for p in self.phases if p.name not in _APART), Figures())

    @property
    def throughput_kept(self) -> float:
        """Ratio of the throughput under faults to that without."""
        rates = {phase.name: phase.figures.rollouts_per_s for phase in self.phases}
        return rates[STORM] / rates[CALM]

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        return {
            "broker": self.broker,
            "seed": self.seed,
            "rollouts": self.rollouts,
            "lease_s": self.lease_s,
            "trainer_deaths": self.trainer_deaths,
            "throughput_kept": self.throughput_kept,
            "violations": self.violations,
            "total": self.figures.to_json(),
            "phases": {
                phase.name: {**phase.figures.to_json(), "lease_s": phase.lease_s}
                for phase in self.phases
            },
        }
