"""What is known of requests that have left their queue, and from when on it counts."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from pipeline.departures import Departures
from pipeline.store.leases import QueueInFlight

START = datetime(2026, 1, 1, tzinfo=UTC)
RUN, OTHER_RUN = uuid.uuid4(), uuid.uuid4()
CPU = QueueInFlight("cpu", [RUN], None)
GPU = QueueInFlight("gpu", [OTHER_RUN], None)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def noted(*facts: tuple[float, float]) -> Departures:
    departures = Departures()
    departures.keep_only([CPU, GPU])
    for seen_s, before_s in facts:
        departures.note(CPU, seen_at=at(seen_s), before=at(before_s))
    return departures


def test_an_observation_counts_only_when_all_before_it_was_read():
    departures = noted((10, 10))
    assert departures.by_run(at(10)) == {}
    assert departures.by_run(at(11)) == {RUN: at(10)}


def test_the_latest_observation_that_counts_is_used():
    departures = noted((10, 5), (11, 8), (12, 9))
    assert departures.by_run(at(12)) == {RUN: at(8)}
    assert departures.by_run(at(13)) == {RUN: at(9)}


def test_what_has_left_does_not_come_back():
    assert noted((10, 9), (11, 3)).by_run(at(20)) == {RUN: at(9)}


def test_one_queue_that_nobody_serves_says_nothing_about_another():
    departures = noted((10, 10))
    assert OTHER_RUN not in departures.by_run(at(20))
    departures.forget(CPU)
    assert departures.by_run(at(20)) == {}


def test_a_queue_without_attempts_in_flight_is_forgotten():
    departures = noted((10, 10))
    departures.keep_only([GPU])
    departures.keep_only([CPU, GPU])
    assert departures.by_run(at(20)) == {}


def test_observations_are_bounded():
    departures = noted(*((second, second) for second in range(1000)))
    assert departures.by_run(at(5)) == {}
    assert departures.by_run(at(999)) == {RUN: at(998)}
