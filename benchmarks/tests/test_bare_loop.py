"""The bare loops run the same rollouts as the pipeline, and the mock's counts agree."""

from dataclasses import replace

import pytest

from benchmarks.bare_loop import calculate
from benchmarks.mock_server import MockServer
from benchmarks.subjects import BareLoop
from benchmarks.workloads import WORKLOADS

# As W2, but with short waits, because these tests do not measure them.
IMPATIENT = replace(WORKLOADS["W2"].behaviour, latency_ms=10, retry_after_s=0.05)


@pytest.fixture(scope="module")
def mock():
    with MockServer() as server:
        yield server


def test_an_action_is_calculated():
    assert calculate("Thought: x\nAction: calculator(expression='17 * 23')") == "391"
    assert calculate("no tool") == "no action found"


@pytest.mark.parametrize("name", ["B1", "B2"])
@pytest.mark.parametrize("workload", ["W0", "W2"])
def test_a_bare_loop_finishes_every_rollout_once(mock, name, workload):
    small = WORKLOADS[workload].resized(rollouts=24, in_flight=12)
    if workload == "W2":
        small = replace(small, behaviour=IMPATIENT)
    measured = BareLoop(name).measure(small, mock)
    assert measured.finished == 24
    assert measured.seen["rollouts_missing"] == 0
    assert measured.seen["rollouts_repeated"] == 0
    calls = small.rollouts * small.behaviour.turns
    assert measured.seen["answered"] == calls
    assert measured.seen["calls"] == calls + sum(measured.seen["errors"].values())
    assert measured.seen["peak_in_flight"] <= 12
    assert set(measured.usage) == {name, "mock"}
    assert measured.peak_rss_bytes > 0


def test_the_loop_that_keeps_ids_finishes_long_conversations(mock):
    small = WORKLOADS["W3"].resized(rollouts=8, in_flight=4)
    small = replace(small, behaviour=replace(small.behaviour, turns=12, context_tokens=300))
    measured = BareLoop("B3").measure(small, mock)
    assert (measured.finished, measured.seen["answered"]) == (8, 96)


def test_two_loops_meet_the_same_errors(mock):
    small = replace(WORKLOADS["W2"].resized(rollouts=24, in_flight=24), behaviour=IMPATIENT)
    errors = [BareLoop("B2").measure(small, mock).seen["errors"] for _ in range(2)]
    assert errors[0] == errors[1] != {}
