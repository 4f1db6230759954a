"""How fast a run goes, as its watcher sees it."""

from __future__ import annotations

import pytest

from rollout.pace import Pace


def test_at_the_first_look_nothing_can_be_said():
    pace = Pace()
    pace.add(5.0, done=100, tokens=1000)
    assert (pace.rollouts_per_s, pace.tokens_per_s, pace.left_s(10)) == (None, None, None)


def test_the_time_left_is_that_of_the_pace_since_the_watch_began():
    pace = Pace()
    pace.add(0.0, done=100, tokens=1000)
    pace.add(10.0, done=120, tokens=6000)
    assert pace.rollouts_per_s == pytest.approx(2.0)
    assert pace.tokens_per_s == pytest.approx(500.0)
    assert pace.left_s(60) == pytest.approx(30.0)
    assert pace.left_s(0) == 0.0


def test_while_nothing_ends_the_time_left_is_unknown():
    pace = Pace()
    pace.add(0.0, done=3, tokens=1)
    pace.add(10.0, done=3, tokens=1)
    assert pace.left_s(7) is None


def test_what_is_long_ago_says_nothing_any_more():
    pace = Pace()
    for second in range(0, 1000, 10):
        pace.add(float(second), done=min(second, 500), tokens=0)
    assert pace.rollouts_per_s == 0.0
