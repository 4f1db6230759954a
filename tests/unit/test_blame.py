"""Who may have killed a worker: the one lost most often, while nobody else was as often."""

import uuid

from pipeline.reconciler import find_codes
from pipeline.retry import HELD_NO_MORE, NEVER_HELD, WORKER_DIED, WORKER_DIED_WITH_OTHERS
from pipeline.store.rollouts import SilentAttempt

ID = uuid.UUID(int=1)


def silent(
    worker_id: str | None, *, lost_count: int = 0, worker_died: bool = True
) -> SilentAttempt:
    return SilentAttempt(ID, ID, ID, 1, "a", worker_id, lost_count, worker_died)


def test_one_alone_on_a_dead_worker_is_suspect():
    assert find_codes([silent("w1"), silent("w2")], unheld=[]) == [WORKER_DIED, WORKER_DIED]


def test_equals_on_a_dead_worker_cover_each_other():
    equal = [silent("w1", lost_count=2), silent("w1", lost_count=2), silent("w1", lost_count=1)]
    assert find_codes(equal, unheld=[]) == [WORKER_DIED_WITH_OTHERS] * 3


def test_the_one_lost_most_often_stands_out():
    codes = find_codes([silent("w1", lost_count=2), silent("w1", lost_count=1)], unheld=[])
    assert codes == [WORKER_DIED, WORKER_DIED_WITH_OTHERS]


def test_a_suspect_that_was_nowhere_announced_may_have_been_anywhere():
    assert find_codes([silent("w1", lost_count=2)], unheld=[2]) == [WORKER_DIED_WITH_OTHERS]
    assert find_codes([silent("w1", lost_count=2)], unheld=[1]) == [WORKER_DIED]
    assert find_codes([silent(None, lost_count=2)], unheld=[2]) == [WORKER_DIED]


def test_where_no_worker_died_nobody_is_suspect():
    alive = [silent("w1", worker_died=False), silent(None, worker_died=False)]
    assert find_codes(alive, unheld=[]) == [HELD_NO_MORE, NEVER_HELD]
