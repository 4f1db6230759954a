"""Who may have killed a worker: the one lost most often, while nobody else was as often."""

import uuid
from datetime import UTC, datetime, timedelta

from pipeline.reconciler import find_codes
from pipeline.retry import HELD_NO_MORE, NEVER_HELD, WORKER_DIED, WORKER_DIED_WITH_OTHERS
from pipeline.store.leases import SilentAttempt, Suspect

ID = uuid.UUID(int=1)
HEARTBEAT_INTERVAL = timedelta(seconds=5)
ALONE, COVERED = [WORKER_DIED], [WORKER_DIED_WITH_OTHERS]


def at(seconds: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def silent(
    worker_id: str | None,
    *,
    lost_count: int = 0,
    worker_died: bool = True,
    rollout_id: uuid.UUID | None = None,
) -> SilentAttempt:
    """An attempt dispatched at 100 s, whose worker was last heard at 110 s."""
    return SilentAttempt(
        ID,
        ID,
        rollout_id or uuid.uuid4(),
        1,
        "a",
        worker_id,
        lost_count,
        worker_died,
        at(100),
        worker_seen_at=at(110) if worker_id else None,
    )


def suspect(
    worker_id: str | None = None,
    *,
    lost_count: int = 2,
    dispatched: float = 100,
    started: float | None = None,
    gone: float | None = None,
    rollout_id: uuid.UUID | None = None,
) -> Suspect:
    return Suspect(
        rollout_id or uuid.uuid4(),
        lost_count,
        worker_id,
        at(dispatched),
        None if started is None else at(started),
        None if gone is None else at(gone),
    )


def codes(*attempts: SilentAttempt, among: tuple[Suspect, ...] = ()) -> list[str]:
    return find_codes(attempts, suspects=among, heartbeat_interval=HEARTBEAT_INTERVAL)


def test_one_alone_on_a_dead_worker_is_suspect():
    assert codes(silent("w1"), silent("w2")) == ALONE * 2


def test_equals_on_a_dead_worker_cover_each_other():
    equal = [silent("w1", lost_count=2), silent("w1", lost_count=2), silent("w1", lost_count=1)]
    assert codes(*equal) == COVERED * 3


def test_the_one_lost_most_often_stands_out():
    found = codes(silent("w1", lost_count=2), silent("w1", lost_count=1))
    assert found == [WORKER_DIED, WORKER_DIED_WITH_OTHERS]


def test_what_no_worker_named_may_have_been_anywhere():
    held = silent("w1", lost_count=2)
    assert codes(held, among=(suspect(),)) == COVERED
    assert codes(held, among=(suspect(gone=120),)) == COVERED
    assert codes(held, among=(suspect(lost_count=1),)) == ALONE


def test_what_was_gone_or_not_yet_dispatched_when_a_worker_died_was_not_in_it():
    held = silent("w1", lost_count=2)
    assert codes(held, among=(suspect(gone=105), suspect(dispatched=120))) == ALONE


def test_what_ran_elsewhere_when_a_worker_died_was_not_in_it():
    held = silent("w1", lost_count=2)
    assert codes(held, among=(suspect("w2", started=105),)) == ALONE


def test_a_request_that_was_delivered_again_may_have_been_in_the_dead_worker_before():
    """Its worker died before it could acknowledge it, and so does the next one."""
    held = silent("w1", lost_count=2)
    assert codes(held, among=(suspect("w2", gone=112),)) == COVERED
    assert codes(held, among=(suspect("w2", started=111),)) == COVERED


def test_what_no_worker_named_may_have_died_of_any_suspect():
    unheld = silent(None, lost_count=2)
    assert codes(unheld) == ALONE
    assert codes(unheld, among=(suspect("w2", started=105, gone=112),)) == COVERED
    assert codes(unheld, among=(suspect("w2", gone=95, dispatched=90),)) == ALONE


def test_nobody_is_company_to_itself():
    held = silent("w1", lost_count=2)
    assert codes(held, among=(suspect(rollout_id=held.rollout_id),)) == ALONE


def test_where_no_worker_died_nobody_is_suspect():
    alive = [silent("w1", worker_died=False), silent(None, worker_died=False)]
    assert codes(*alive) == [HELD_NO_MORE, NEVER_HELD]
