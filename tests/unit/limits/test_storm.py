"""When a 429 is everybody's affair."""

from __future__ import annotations

from pipeline.limits.storm import Storm


def test_a_stray_refusal_among_answers_is_no_storm() -> None:
    storm = Storm()
    for _ in range(9):
        storm.answered()
    assert not storm.refused()


def test_the_first_refusal_of_a_process_is_no_storm() -> None:
    assert not Storm().refused()


def test_refusals_only_are_a_storm() -> None:
    storm = Storm()
    assert [storm.refused() for _ in range(4)] == [False, False, True, True]


def test_a_storm_ends_when_calls_are_answered_again() -> None:
    storm = Storm()
    for _ in range(20):
        storm.refused()
    for _ in range(15):
        storm.answered()
    assert not storm.refused()
