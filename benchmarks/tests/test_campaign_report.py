"""The table of a fault campaign shows every phase, every fault and every broken promise."""

from collections import Counter

import pytest

from benchmarks.faults.figures import Figures
from benchmarks.faults.report import campaign_table
from benchmarks.faults.results import CALM, KILL, STORM, Campaign, Phase

C1, C10 = "C1 kill -9 of a worker", "C10 Postgres stopped immediately"


@pytest.fixture
def campaign() -> Campaign:
    calm = Figures(rollouts=100, executions=100, tokens=1000, wall_s=10.0)
    storm = Figures(
        rollouts=400,
        executions=420,
        repeated=20,
        tokens=4000,
        tokens_wasted=200,
        wall_s=80.0,
        recoveries=[(C1, 4.0), (C1, 6.0)],
        faults=Counter({C1: 2, C10: 1}),
    )
    kill = Figures(rollouts=64, wall_s=40.0, recoveries=[(C1, 33.0)], faults=Counter({C1: 1}))
    return Campaign(
        "redis",
        7,
        400,
        3.0,
        phases=[
            Phase(CALM, calm, [], 3.0),
            Phase(STORM, storm, [], 3.0),
            Phase(KILL, kill, [], 30.0),
        ],
        trainer_deaths=12,
    )


def row_of(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_sums_leave_out_the_phases_without_faults_and_with_another_lease(campaign: Campaign):
    assert campaign.figures.rollouts == 400
    assert campaign.figures.recoveries_s == [4.0, 6.0]
    assert campaign.throughput_kept == pytest.approx(0.5)


def test_each_phase_and_fault_has_its_row(campaign: Campaign):
    text = campaign_table(campaign)
    assert row_of(text, STORM)[1:] == [
        *("3 s", "400", "0", "0", "0", "20", "5.0%", "6.0 s", "6.0 s", "5.0")
    ]
    assert row_of(text, KILL)[8] == "33.0 s"
    assert row_of(text, C1)[1:] == ["2", "6.0 s", "6.0 s"]
    assert row_of(text, C10)[1:] == ["1", "–", "–"]
    assert row_of(text, "C14 kill -9 of a trainer")[1] == "12"
    assert text.index(C1) < text.index(C10)
    assert "No violation" in text


def test_a_broken_promise_is_never_left_out(campaign: Campaign):
    campaign.phases[1].violations.append("I1: r0 is running")
    text = campaign_table(campaign)
    assert "VIOLATION I1: r0 is running" in text
    assert "No violation" not in text
    assert campaign.to_json()["violations"] == ["I1: r0 is running"]
