import pytest

from pipeline.limits.clock_offset import ClockOffset


def test_the_quickest_round_trip_is_believed() -> None:
    offset = ClockOffset()
    offset.note(sent_at=10.0, received_at=10.5, server_at=1000.4)
    offset.note(sent_at=20.0, received_at=20.002, server_at=1010.001)
    offset.note(sent_at=30.0, received_at=30.6, server_at=1020.1)
    assert offset.local(1100.0) == pytest.approx(110.0, abs=0.002)


def test_a_server_whose_clock_was_set_is_followed_at_once() -> None:
    offset = ClockOffset()
    offset.note(sent_at=10.0, received_at=10.001, server_at=1000.0)
    offset.note(sent_at=11.0, received_at=11.01, server_at=701.0)
    assert offset.local(702.0) == pytest.approx(12.0, abs=0.02)


def test_a_steady_lateness_becomes_the_usual() -> None:
    offset = ClockOffset()
    for _ in range(30):
        offset.note_lateness(0.3)
    assert offset.lag_s == pytest.approx(0.3, rel=0.01)
