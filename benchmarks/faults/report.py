"""The campaign's table for the terminal and for docs/reliability.md."""

from __future__ import annotations

from benchmarks.faults.figures import Figures
from benchmarks.faults.injections import NOT_APPLICABLE
from benchmarks.faults.results import Campaign
from benchmarks.report import table


def campaign_table(campaign: Campaign) -> str:
    """Return the figures of each phase, and the recoveries of each fault."""
    rows = [_row(phase.name, phase.lease_s, phase.figures) for phase in campaign.phases]
    rows.append(_row("all faults, short lease", campaign.lease_s, campaign.figures))
    parts = [
        f"Broker {campaign.broker}, seed {campaign.seed}.",
        table(list(_COLUMNS), rows),
        table(["fault", "injected", "recovery p50", "p99"], _recoveries(campaign)),
        *(
            f"Not applicable to {campaign.broker}: {fault} ({reason})."
            for fault, reason in NOT_APPLICABLE[campaign.broker].items()
        ),
        f"Throughput under faults / without: {campaign.throughput_kept:.2f}.",
        *(f"VIOLATION {violation}" for violation in campaign.violations),
        "No violation of I1-I12." if not campaign.violations else "",
    ]
    return "\n\n".join(part for part in parts if part)


_COLUMNS = (
    "phase",
    "lease",
    "rollouts",
    "lost",
    "accepted twice",
    "failed",
    "run again",
    "tokens wasted",
    "recovery p50",
    "p99",
    "rollouts/s",
)


def _row(name: str, lease_s: float, figures: Figures) -> list[str]:
    wasted = figures.tokens_wasted / figures.tokens if figures.tokens else 0.0
    return [
        name,
        f"{lease_s:g} s",
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


def _recoveries(campaign: Campaign) -> list[list[str]]:
    figures = campaign.figures
    trainers = ["C14 kill -9 of a trainer", str(campaign.trainer_deaths), "–", "–"]
    return [
        [
            name,
            str(count),
            _seconds(figures.recovery_s(0.5, name)),
            _seconds(figures.recovery_s(0.99, name)),
        ]
        for name, count in sorted(figures.faults.items(), key=_by_number)
    ] + [trainers]


def _by_number(fault: tuple[str, int]) -> tuple[int, str]:
    name = fault[0]
    return int(name.split()[0].strip("C,")), name


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
