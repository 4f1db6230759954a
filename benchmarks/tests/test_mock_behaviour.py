"""Latency and errors as a function of the seed."""

from statistics import mean, median

import pytest

from benchmarks.mock_behaviour import CallPlan, MockBehaviour

CALLS = [(f"g{number:06d}-r0", turn, 0) for number in range(1000) for turn in range(3)]


def test_without_spread_every_call_takes_the_same():
    assert MockBehaviour(latency_ms=100).decide("g1-r0", 0, 0) == CallPlan(200, 0.1)


def test_fates_do_not_depend_on_the_order_of_calls():
    behaviour = MockBehaviour(latency_ms=100, sigma=1.0, error_rate=0.1)
    forward = [behaviour.decide(*call) for call in CALLS]
    backward = [behaviour.decide(*call) for call in reversed(CALLS)]
    assert forward == backward[::-1]


def test_another_seed_draws_other_fates():
    drawn = [
        [MockBehaviour(latency_ms=100, sigma=1.0, seed=seed).decide(*call) for call in CALLS[:9]]
        for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1]


def test_a_retry_draws_again():
    behaviour = MockBehaviour(error_rate=0.5)
    statuses = {behaviour.decide("g1-r0", 0, tries).status for tries in range(64)}
    assert statuses == {200, 429, 500}


def test_latency_is_lognormal_around_its_median():
    behaviour = MockBehaviour(latency_ms=100, sigma=1.0)
    delays = [behaviour.decide(*call).delay_s for call in CALLS]
    assert median(delays) == pytest.approx(0.1, rel=0.1)
    assert mean(delays) == pytest.approx(0.1 * 2.718281828**0.5, rel=0.15)


def test_errors_are_half_429_and_half_500():
    behaviour = MockBehaviour(latency_ms=100, error_rate=0.1)
    fates = [behaviour.decide(*call) for call in CALLS]
    share = {status: sum(f.status == status for f in fates) / len(fates) for status in (429, 500)}
    assert share == pytest.approx({429: 0.05, 500: 0.05}, abs=0.015)
    assert {fate.delay_s for fate in fates if fate.status == 429} == {0.0}


def test_a_misspelt_field_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown \['latency'\]; known are .*latency_ms"):
        MockBehaviour.from_json({"latency": 3})


@pytest.mark.parametrize("wrong", [{"error_rate": 1.0}, {"latency_ms": -1}, {"turns": 0}])
def test_an_impossible_behaviour_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must|give"):
        MockBehaviour.from_json(wrong)


def test_a_behaviour_survives_json():
    behaviour = MockBehaviour(latency_ms=5, sigma=0.5, error_rate=0.2, seed=9)
    assert MockBehaviour.from_json(behaviour.to_json()) == behaviour
