"""The watermark: the time before which every message of a worker has been committed.

Collectors send markers through the queues of the workers and record here which were read
(docs/adr/0034). Used by the collector and the reconciler. All times are those of the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, text

from pipeline.contract.messages import MARKED_QUEUES, Marker

#: On a broker without order an unread marker counts as lost after the time for which the broker
#: hides a dead consumer's messages, times this: the consumer may have received it somewhat later.
_LOST_AFTER = 1.5
#: Seconds after which a marker that does not count any more is deleted.
_KEPT_S = 300.0
#: The margin of a broker without order, as a part of the grace time. A single message that takes
#: even longer costs a second execution at most.
_MARGIN = 0.2


class CollectorReport(NamedTuple):
    """The answer of the store to a collector's report."""

    now: datetime
    silent: tuple[str, ...]  #: ids of other collectors that no longer report


# The first collector waits for `grace_s`, like one that was cut off: the workers may have been cut
# off as well, and need that time until their messages arrive again.
_REPORT = text("""
INSERT INTO processes (process_id, kind, takes, committed_up_to, markers_from)
VALUES (:id, 'collector', jsonb_build_object('max_sessions', CAST(:max_sessions AS integer)),
        coalesce(CAST(:committed_up_to AS timestamptz), now()),
        CASE WHEN :was_cut_off
                  OR NOT EXISTS (SELECT FROM processes WHERE kind = 'collector')
             THEN now() + make_interval(secs => :grace_s) END)
ON CONFLICT (process_id) DO UPDATE SET last_seen_at = now(),
    committed_up_to = excluded.committed_up_to,
    markers_from = greatest(excluded.markers_from, processes.markers_from)
RETURNING now() AS now
""")

# On a broker that keeps order, all messages ahead of a marker in its queue were delivered before
# the marker was read: to its reader, which commits them with the marker or before it, or to other
# collectors, whose `committed_up_to` has to pass the time of the reading. On another one, only a
# marker before which none is missing counts, and `margin_s` covers messages that take longer than
# the markers around them.
_ADVANCE = text("""
WITH judged AS (
    SELECT queue, sent_at, read_at IS NOT NULL AND NOT EXISTS (
        SELECT FROM processes WHERE kind = 'collector'
          AND process_id <> read_by AND committed_up_to < read_at) AS is_read
    FROM markers
), passed AS (
    SELECT queue, max(sent_at) AS up_to FROM judged
    WHERE is_read AND NOT EXISTS (
        SELECT FROM processes WHERE kind = 'collector' AND markers_from > judged.sent_at)
      AND (:lost_after_s = 0 OR NOT EXISTS (
        SELECT FROM judged missing
        WHERE missing.queue = judged.queue AND missing.sent_at < judged.sent_at
          AND NOT missing.is_read
          AND missing.sent_at > now() - make_interval(secs => :lost_after_s)))
    GROUP BY queue
), watermark AS (
    SELECT min(up_to) - make_interval(secs => :margin_s) AS at FROM passed
    HAVING count(*) = :queues
)
UPDATE processes SET read_up_to = greatest(read_up_to, watermark.at)
FROM watermark WHERE process_id = :id
""")

# Rows that another collector has just locked are deleted by the next report.
_DELETE_MARKERS = text("""
DELETE FROM markers WHERE (queue, sent_at, collector_id) IN (
    SELECT queue, sent_at, collector_id FROM markers
    WHERE sent_at < greatest(
        (SELECT max(read_up_to) FROM processes WHERE kind = 'collector')
            - make_interval(secs => :margin_s),
        now() - make_interval(secs => :kept_s))
    FOR UPDATE SKIP LOCKED)
""")

# Unread markers of a collector that was cut off may not have been sent. On a broker without order
# they would count as missing.
_DELETE_UNREAD = text("DELETE FROM markers WHERE collector_id = :id AND read_at IS NULL")

_ADD_MARKERS = text("""
INSERT INTO markers (queue, sent_at, collector_id)
SELECT queue, now(), :id FROM unnest(CAST(:queues AS text[])) AS queue
""")

_SILENT = text("""
SELECT process_id FROM processes WHERE kind = 'collector' AND process_id <> :id
  AND last_seen_at < now() - make_interval(secs => :alive_s)
""")

_READ = text("""
UPDATE markers SET read_at = now(), read_by = :reader
WHERE queue = :queue AND sent_at = :sent_at AND collector_id = :id AND read_at IS NULL
""")

_REMOVE = text("DELETE FROM processes WHERE kind = 'collector' AND process_id = ANY(:ids)")

_RESTART = text("""
UPDATE processes SET markers_from = greatest(markers_from, now()) WHERE kind = 'collector'
""")

_WATERMARK = text("""
SELECT max(read_up_to) FROM processes WHERE kind = 'collector'
""")


def report_collector(
    connection: Connection,
    collector_id: str,
    *,
    committed_up_to: datetime | None,
    was_cut_off: bool,
    with_markers: bool,
    grace_s: float,
    alive_s: float,
    hides_s: float,
    max_sessions: int | None = None,
) -> CollectorReport:
    """Record that a collector is alive, advance the watermark and note the next markers.

    Args:
        connection: An open transaction.
        collector_id: The collector that reports.
        committed_up_to: All messages that the broker had sent it by then are committed; None: it
            has just connected, or connects next, and holds none.
        was_cut_off: Whether it had no connection to the broker, or could not publish, since its
            last report.
        with_markers: Whether it now sends a marker through each queue, with the returned time.
        grace_s: After that, markers of this long do not count; the workers reconnect meanwhile.
        alive_s: Silence after which another collector counts as dead.
        hides_s: On a broker without order, the time for which it hides a dead consumer's
            messages before it delivers them again; 0: the broker keeps order.
        max_sessions: The setting `agentcore.max_sessions`, by which the status explains waits.
    """
    values = {
        "id": collector_id,
        "max_sessions": max_sessions,
        "committed_up_to": committed_up_to,
        "was_cut_off": was_cut_off,
        "grace_s": grace_s,
        "alive_s": alive_s,
        "margin_s": _MARGIN * grace_s if hides_s else 0,
        "lost_after_s": _LOST_AFTER * hides_s,
        "kept_s": _KEPT_S,
    }
    now = connection.execute(_REPORT, values).scalar_one()
    connection.execute(_ADVANCE, values | {"queues": len(MARKED_QUEUES)})
    connection.execute(_DELETE_MARKERS, values)
    if was_cut_off:
        connection.execute(_DELETE_UNREAD, values)
    if with_markers:
        connection.execute(_ADD_MARKERS, values | {"queues": list(MARKED_QUEUES)})
    silent = connection.execute(_SILENT, values).scalars()
    return CollectorReport(now, tuple(silent))


def record_markers(connection: Connection, reader: str, markers: Sequence[Marker]) -> None:
    """Record markers that a collector read; call it last, after the messages read with them."""
    for marker in sorted(markers, key=lambda marker: (marker.queue, marker.sent_at)):
        connection.execute(
            _READ,
            {
                "queue": marker.queue,
                "sent_at": marker.sent_at,
                "id": marker.collector_id,
                "reader": reader,
            },
        )


def remove_collectors(connection: Connection, collector_ids: Sequence[str]) -> None:
    """Remove collectors that ended; call it after their messages are back in the queues.

    These messages may come behind markers that were already read, so only markers that are sent
    from now on count.
    """
    connection.execute(_REMOVE, {"ids": list(collector_ids)})
    connection.execute(_RESTART)


def read_watermark(connection: Connection) -> datetime | None:
    """Return the time before which all messages of workers were committed; None while unknown."""
    return connection.execute(_WATERMARK).scalar_one()
