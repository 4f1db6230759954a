"""The campaign's table, for people and for docs/reliability.md."""

from __future__ import annotations

from benchmarks.faults.campaign import Campaign
from benchmarks.faults.figures import Figures
from benchmarks.report import table


def campaign_table(campaign: Campaign) -> str:
    """Return the figures of each phase, and the recoveries of each fault."""
    rows = [_row(phase.name, phase.figures) for phase in campaign.phases]
    rows.append(_row("all faults together", campaign.figures))
    parts = [
        f"broker {campaign.broker}, seed {campaign.seed}, lease {campaign.lease_s:g} s",
        table(list(_COLUMNS), rows),
        table(["fault", "injected", "recovery p50", "p99"], _recoveries(campaign.figures)),
        f"trainers killed: {campaign.trainer_deaths}",
        *(f"VIOLATION {violation}" for violation in campaign.violations),
        "No violation of I1-I11." if not campaign.violations else "",
    ]
    return "\n\n".join(part for part in parts if part)


_COLUMNS = (
    "phase",
    "rollouts",
    "lost",
    "accepted twice",
    "failed",
    "repeated",
    "tokens wasted",
    "recovery p50",
    "p99",
    "rollouts/s",
)


def _row(name: str, figures: Figures) -> list[str]:
    wasted = figures.tokens_wasted / figures.tokens if figures.tokens else 0.0
    return [
        name,
        str(figures.rollouts),
        str(figures.lost),
        str(figures.accepted_twice),
        str(figures.failed),
        str(figures.repeated),
        f"{wasted:.1%}",
        _seconds(figures.recovery_s(0.5)),
        _seconds(figures.recovery_s(0.99)),
        f"{figures.rollouts_per_s:.1f}",
    ]


def _recoveries(figures: Figures) -> list[list[str]]:
    return [
        [
            name,
            str(count),
            _seconds(figures.recovery_s(0.5, name)),
            _seconds(figures.recovery_s(0.99, name)),
        ]
        for name, count in sorted(figures.faults.items())
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
