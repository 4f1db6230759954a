from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.offline_policy.draws import (
    MAX_FAILURES_IN_A_ROW,
    Mishap,
    draw,
    expected_is_wrong,
    failure_of_call,
    mishap_of_sample,
)


@given(seed=st.integers(), text=st.text(), key=st.integers() | st.text())
def test_a_draw_is_a_number_of_its_arguments_alone(seed: int, text: str, key: object) -> None:
    value = draw(seed, "wrong", text, key)
    assert 0 <= value < 1
    assert value == draw(seed, "wrong", text, key)
    assert not expected_is_wrong(seed, text, key, 0.0)
    assert expected_is_wrong(seed, text, key, 1.0)


def test_the_rates_are_met_over_many_samples() -> None:
    keys = [(f"prompt {n // 4}", n % 4) for n in range(4000)]
    wrong = sum(expected_is_wrong(7, *key, 0.2) for key in keys)
    failures = Counter(failure_of_call(7, (*key, 2), 0, 0.1) for key in keys)
    assert 0.17 < wrong / 4000 < 0.23
    assert 0.03 < failures[Mishap.RATE_LIMIT] / 4000 < 0.07
    assert 0.03 < failures[Mishap.SERVER_ERROR] / 4000 < 0.07


def test_being_wrong_and_failing_have_nothing_to_do_with_each_other() -> None:
    keys = [(f"prompt {n // 4}", n % 4) for n in range(4000)]
    wrong = [key for key in keys if expected_is_wrong(7, *key, 0.5)]
    failing = sum(failure_of_call(7, (*key, 2), 0, 0.5) is not None for key in wrong)
    assert 0.45 < failing / len(wrong) < 0.55


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_repeated_call_gets_through(rate: float) -> None:
    for n in range(200):
        tries = [
            failure_of_call(1, (f"p{n}", 0, 2), nth, rate)
            for nth in range(MAX_FAILURES_IN_A_ROW + 1)
        ]
        assert tries[-1] is None


def test_every_mishap_is_met_and_none_at_rate_zero() -> None:
    met = Counter(mishap_of_sample(3, f"p{n}", n % 4, 0.25) for n in range(2000))
    assert set(met) == {None, *Mishap}
    assert 0.2 < 1 - met[None] / 2000 < 0.3
    assert mishap_of_sample(3, "p", 0, 0.0) is None
