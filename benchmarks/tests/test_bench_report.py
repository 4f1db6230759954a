"""Ratios of pairs and verdicts on goals."""

import json

import pytest

from benchmarks import report
from benchmarks.pairs import Comparison, compare
from benchmarks.process_tree import TreeUsage
from benchmarks.report import Figure
from benchmarks.subjects import Measurement
from benchmarks.workloads import WORKLOADS

SEEN = {"peak_in_flight": 500, "rollouts_missing": 0, "rollouts_repeated": 0}
MIB = 2**20


def measurement(subject: str, cpu_s: float, wall_s: float = 2.0) -> Measurement:
    usage = {
        subject: TreeUsage(cpu_s - 1, 80 * MIB),
        "postgres": TreeUsage(1.0, 90 * MIB),
        "mock": TreeUsage(0.5, 900 * MIB),
    }
    return Measurement(subject, "W0", 1000, 1000, wall_s, usage, SEEN)


class Scripted:
    """A subject whose measurements are given."""

    def __init__(self, name: str, cpus: list[float], log: list[str]) -> None:
        self.name = name
        self._cpus = iter(cpus)
        self._log = log

    def measure(self, workload, mock) -> Measurement:
        self._log.append(self.name)
        return measurement(self.name, next(self._cpus))


def test_cpu_includes_the_database_and_leaves_the_mock_out():
    one = measurement("pipeline", cpu_s=6.0)
    assert one.cpu_s == 6.0
    assert one.cpu_ms_per_rollout == 6.0
    assert one.peak_rss_bytes == 90 * MIB


def test_pairs_take_turns_and_the_median_of_their_ratios_counts():
    log: list[str] = []
    found = compare(
        Scripted("B1", [4.0, 2.0, 4.0], log),
        Scripted("pipeline", [6.0, 30.0, 4.0], log),
        WORKLOADS["W0"],
        mock=None,  # type: ignore[arg-type]
        pairs=3,
    )
    assert log == ["B1", "pipeline"] * 3
    assert found.ratios("cpu") == [1.5, 15.0, 1.0]
    assert found.ratio("cpu") == 1.5


def test_less_than_one_pair_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        compare(Scripted("a", [], []), Scripted("b", [], []), WORKLOADS["W0"], None, pairs=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (1.2, True, "stretch"),
        (1.4, True, "must"),
        (1.6, True, "missed"),
        (2.0, False, "stretch"),
        (1.0, False, "missed"),
    ],
)
def test_a_figure_says_what_it_reaches(value, at_most, verdict):
    assert Figure("G1", "CPU", value, must=1.5, stretch=1.25, at_most=at_most).verdict == verdict


def test_a_figure_without_goal_is_information():
    assert Figure("", "CPU of Postgres", 3.0).verdict == ""


def test_a_missed_goal_stays_in_the_table():
    table = report.figure_table([Figure("G1", "CPU / B1", 1.7, must=1.5, stretch=1.25)])
    assert "| G1 | CPU / B1 | 1.7   | 1.5  | 1.25    | missed  |" in table


def test_the_report_is_json_with_every_run():
    found = Comparison([(measurement("B1", 4.0), measurement("pipeline", 6.0))])
    said = json.loads(json.dumps(report.to_json(comparisons=[found])))
    assert said["comparisons"][0]["ratios"]["cpu"] == {"median": 1.5, "pairs": [1.5]}
    assert len(said["comparisons"][0]["runs"]) == 2
    assert said["machine"]["cores"] >= 1
    assert "500 in flight, 0 missing, 0 repeated, 25% busy" in report.comparison_table([found])


def test_ideal_time_is_waves_times_turns_times_latency():
    assert WORKLOADS["W1s"].ideal_s == 6.0
    assert WORKLOADS["W0"].ideal_s == 0.0
