"""When 429s pause all calls of an endpoint."""

from __future__ import annotations

from pipeline.limits.rate_limit_detector import RateLimitDetector


def test_a_single_refusal_among_answers_is_not_a_rate_limit() -> None:
    detector = RateLimitDetector()
    for _ in range(9):
        detector.note_answered()
    assert not detector.note_refused()


def test_the_first_refusal_of_a_process_is_not_a_rate_limit() -> None:
    assert not RateLimitDetector().note_refused()


def test_refusals_alone_are_a_rate_limit() -> None:
    detector = RateLimitDetector()
    assert [detector.note_refused() for _ in range(4)] == [False, False, True, True]


def test_a_rate_limit_ends_when_calls_are_answered_again() -> None:
    detector = RateLimitDetector()
    for _ in range(20):
        detector.note_refused()
    for _ in range(15):
        detector.note_answered()
    assert not detector.note_refused()
