"""The watermark: how far markers and commits prove that the queues are read."""

from __future__ import annotations

from datetime import timedelta

import pytest
from fixtures.collectors import StoredCollector
from sqlalchemy import text

from pipeline.contract.messages import COMPLETION_QUEUE, HEARTBEAT_QUEUE
from pipeline.store.engine import transact

MICROSECOND = timedelta(microseconds=2)


@pytest.fixture
def one(engine) -> StoredCollector:
    return StoredCollector(engine, "c1")


def test_there_is_no_watermark_before_a_marker_was_read_and_committed(one):
    assert one.watermark() is None
    sent_at = one.report().now
    assert one.watermark() is None
    one.read(sent_at)
    one.report()
    assert one.watermark() == sent_at


def test_the_watermark_is_that_of_the_queue_that_is_read_more_slowly(one):
    first = one.catch_up()
    second = one.report().now
    one.read(second, queues=[HEARTBEAT_QUEUE])
    one.report()
    one.report()
    assert one.watermark() == first
    one.read(second, queues=[COMPLETION_QUEUE])
    one.report()
    one.report()
    assert one.watermark() == second


def test_a_marker_proves_nothing_while_another_collector_holds_earlier_messages(engine, one):
    one.catch_up()
    other = StoredCollector(engine, "c2")
    other.report()
    before = one.watermark()
    sent_at = one.report().now
    one.read(sent_at)
    one.report()
    one.report()
    assert one.watermark() == before
    other.report()  # has committed what it held before
    other.report()
    assert one.watermark() == sent_at


def test_a_collector_that_just_starts_does_not_take_the_watermark_away(engine, one):
    one.catch_up()
    before = one.watermark()
    started = StoredCollector(engine, "c2", grace_s=60)
    started.report()
    assert one.watermark() == before
    # It was never cut off, so nobody waits for its grace time.
    sent_at = one.report().now
    one.read(sent_at)
    for collector in (one, started, one, started, one):
        collector.report()
    assert one.watermark() == sent_at


def test_after_a_cut_markers_count_only_when_the_grace_time_has_passed(engine):
    cut = StoredCollector(engine, "c1", grace_s=0.0)
    before = cut.catch_up()
    cut.report(was_cut_off=True, grace_s=60.0)
    cut.catch_up()
    assert cut.watermark() == before
    query = "UPDATE processes SET markers_from = markers_from - interval '2 minutes'"
    transact(engine, lambda c: c.execute(text(query)))
    assert cut.catch_up() == cut.watermark()


def test_the_first_collector_gives_workers_the_grace_time_to_reconnect(engine):
    first = StoredCollector(engine, "c1", grace_s=60.0)
    first.catch_up()
    assert first.watermark() is None


def test_a_silent_collector_holds_the_watermark_until_its_messages_are_back(engine, one):
    dead = StoredCollector(engine, "c2")
    one.report()
    dead.report()
    before = one.catch_up()
    dead.fall_silent()
    assert one.watermark() != before
    report = one.report()
    assert report.silent == ("c2",)
    one.read(report.now)
    one.end("c2")
    # Its messages may now come behind the markers that were read while it held them.
    one.report()
    one.report()
    assert one.watermark() is None
    assert one.catch_up() == one.watermark()


def test_markers_that_are_no_longer_needed_are_deleted(engine, one):
    for _ in range(5):
        one.catch_up()
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT sent_at FROM markers ORDER BY 1")).scalars().all()
    assert min(rows) == one.watermark()


def test_a_queue_without_order_is_read_up_to_the_first_missing_marker(engine):
    unordered = StoredCollector(engine, "c1", hides_s=60.0)
    first, second, third = (unordered.report().now for _ in range(3))
    for sent_at in (first, third):
        unordered.read(sent_at)
    unordered.report()
    unordered.report()
    assert unordered.watermark() == first
    unordered.read(second)
    # Single messages may take longer than the markers around them.
    grace_s = (third - first).total_seconds()
    unordered.report(grace_s=grace_s)
    unordered.report(grace_s=grace_s)
    watermark = unordered.watermark()
    assert watermark is not None
    assert abs(watermark - third + timedelta(seconds=grace_s / 5)) <= MICROSECOND


def test_a_marker_that_a_queue_without_order_lost_is_not_waited_for_without_end(engine):
    unordered = StoredCollector(engine, "c1", hides_s=60.0)
    unordered.report()  # its marker is lost
    unordered.catch_up()
    assert unordered.watermark() is None
    query = "UPDATE markers SET sent_at = sent_at - interval '3 minutes' WHERE read_at IS NULL"
    transact(engine, lambda c: c.execute(text(query)))
    assert unordered.catch_up() == unordered.watermark()
