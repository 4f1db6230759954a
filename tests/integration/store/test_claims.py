"""Claims: each rollout to one dispatcher, in order, within the run."""

from __future__ import annotations

import threading
from collections import Counter

from fixtures.stored_run import StoredRun
from sqlalchemy import text

from pipeline.contract.rollout import RunState
from pipeline.store.engine import open_engine, transact
from pipeline.store.rollouts import claim, count_in_flight
from pipeline.store.runs import active_runs, set_run_state


def test_rollouts_are_claimed_in_order_of_their_groups(engine):
    story = StoredRun(engine, prompts=3, n=2)
    claimed = story.claim(4) + story.claim(4)
    places = [(attempt.group_no, attempt.rollout_index) for attempt in claimed]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_claim_says_all_that_a_request_needs(engine):
    story = StoredRun(engine, n=4)
    attempt = story.claim_one()
    assert (attempt.attempt_no, attempt.n, attempt.group_no, attempt.rollout_index) == (1, 4, 0, 0)
    assert attempt.payload == {"content": "What is 0 + 1?", "answer": "1"}


def test_dispatchers_that_claim_at_once_never_get_the_same_rollout(engine):
    story = StoredRun(engine, prompts=50, n=4)
    url = engine.url.render_as_string(hide_password=False)
    engines = [open_engine(url) for _ in range(4)]
    claimed: Counter[object] = Counter()
    start = threading.Barrier(len(engines))

    def dispatch(own) -> None:
        start.wait()
        while found := transact(own, lambda c: claim(c, story.run, most=7, lease_s=60)):
            claimed.update((attempt.rollout_id, attempt.attempt_no) for attempt in found)

    threads = [threading.Thread(target=dispatch, args=(own,)) for own in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in engines:
        own.dispose()
    assert len(claimed) == 200
    assert set(claimed.values()) == {1}


def test_a_claim_that_is_rolled_back_leaves_the_rollouts_queued(engine):
    story = StoredRun(engine, n=2)
    with engine.connect() as connection:
        assert len(claim(connection, story.run, most=2, lease_s=60)) == 2
        connection.rollback()
    assert story.states() == {"queued": 2}
    assert [attempt.attempt_no for attempt in story.claim()] == [1, 1]


def test_attempt_numbers_are_never_used_again(engine):
    story = StoredRun(engine, max_lost=100)
    for expected in range(1, 6):
        attempt = story.claim_one()
        assert attempt.attempt_no == expected
        story.record(story.lost(attempt))


def test_what_is_in_flight_is_counted_by_run(engine):
    one, other = StoredRun(engine, n=3), StoredRun(engine, n=3)
    claimed = one.claim(2)
    other.claim(3)
    one.beat(claimed[0])
    counts = transact(engine, count_in_flight)
    assert counts == {one.run.run_id: 2, other.run.run_id: 3}
    one.record(one.succeeded(claimed[0]))
    assert transact(engine, count_in_flight)[one.run.run_id] == 1


def test_only_active_runs_with_queued_rollouts_are_dispatched_highest_priority_first(engine):
    low, high, done, paused = (StoredRun(engine, priority=priority) for priority in (0, 5, 9, 9))
    done.claim()
    transact(engine, lambda c: set_run_state(c, paused.run, RunState.PAUSED, reason="by hand"))
    slugs = [run.slug for run in transact(engine, active_runs)]
    assert slugs == [high.run.slug, low.run.slug]


def test_a_transaction_that_meets_a_deadlock_is_done_again(engine):
    story = StoredRun(engine, prompts=2)
    first, second = (row["rollout_id"] for row in story.rollouts())
    touch = text("UPDATE rollouts SET lost_count = lost_count + 1 WHERE rollout_id = :id")
    both_hold_one = threading.Barrier(2, timeout=10)
    tries: Counter[str] = Counter()

    def work(name: str, ids):
        def in_transaction(connection) -> None:
            tries[name] += 1
            connection.execute(touch, {"id": ids[0]})
            if tries[name] == 1:
                both_hold_one.wait()
            connection.execute(touch, {"id": ids[1]})

        transact(engine, in_transaction)

    threads = [
        threading.Thread(target=work, args=("a", (first, second))),
        threading.Thread(target=work, args=("b", (second, first))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(tries.values()) == 3
    assert [row["lost_count"] for row in story.rollouts()] == [2, 2]
