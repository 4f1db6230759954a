"""Leases: renewed by heartbeats, judged by the database clock and by what was certainly read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from sqlalchemy import text

from pipeline.contract.messages import Heartbeat
from pipeline.store.engine import transact
from pipeline.store.leases import SilentAttempt, keep_alive, queues_in_flight, silent_attempts
from pipeline.store.processes import list_processes


@pytest.fixture
def story(engine) -> StoredRun:
    return StoredRun(engine, n=4)


def age(story: StoredRun, attempts: Sequence[Any], **columns: float) -> None:
    """Move times of attempts into the past: nobody waits for a lease here."""
    for name, seconds in columns.items():
        transact(
            story.engine,
            lambda c, name=name, seconds=seconds: c.execute(
                text(
                    f"UPDATE attempts SET {name} = {name} - make_interval(secs => :s) "
                    "WHERE rollout_id = ANY(:ids)"
                ),
                {"s": seconds, "ids": [attempt.rollout_id for attempt in attempts]},
            ),
        )


def silent(
    story: StoredRun,
    *,
    read_s_ago: float = 0.0,
    departed_s_ago: float | None = None,
    expire: bool = True,
    grace_s: float = 5.0,
    most: int = 100,
) -> list[SilentAttempt]:
    def work(connection: Any) -> list[SilentAttempt]:
        times = connection.execute(
            text(
                "SELECT now() - make_interval(secs => :read) AS read, "
                "now() - make_interval(secs => :departed) AS departed"
            ),
            {"read": read_s_ago, "departed": departed_s_ago},
        ).one()
        return silent_attempts(
            connection,
            watermark=times.read,
            departed={} if times.departed is None else {story.run.run_id: times.departed},
            expire=expire,
            grace_s=grace_s,
            most=most,
        )

    return transact(story.engine, work)


def lease_left_s(story: StoredRun, attempt: Any) -> float:
    (row,) = story.rows(
        "SELECT extract(epoch FROM lease_until - now()) AS left FROM attempts "
        "WHERE rollout_id = :id",
        id=attempt.rollout_id,
    )
    return float(row["left"])


def test_a_first_heartbeat_makes_an_attempt_run_and_says_where(story):
    attempt = story.claim_one()
    assert story.beat(attempt, worker_id="w7", phase="scoring") == []
    row = story.attempt(attempt)
    assert (row["state"], row["worker_id"], row["phase"]) == ("running", "w7", "scoring")
    assert row["started_at"] is not None
    assert story.rollout(attempt)["state"] == "running"


def test_a_reserved_attempt_is_held_but_does_not_run(story):
    attempt = story.claim_one(lease_s=10)
    story.beat(attempt, phase="reserved", lease_s=600)
    row = story.attempt(attempt)
    assert (row["state"], row["worker_id"], row["started_at"]) == ("dispatched", "w1", None)
    assert story.rollout(attempt)["state"] == "dispatched"
    assert lease_left_s(story, attempt) > 500


def test_heartbeats_renew_leases_when_a_third_is_gone(story):
    attempt = story.claim_one()
    story.beat(attempt, lease_s=60)
    age(story, [attempt], lease_until=10)
    story.beat(attempt, lease_s=60)
    assert lease_left_s(story, attempt) < 51  # fresh enough: no write
    age(story, [attempt], lease_until=15)
    story.beat(attempt, lease_s=60)
    assert lease_left_s(story, attempt) > 58


def test_a_repeated_heartbeat_leaves_one_event(story):
    attempt = story.claim_one()
    for _ in range(3):
        story.beat(attempt)
    moves = [event["to_state"] for event in story.everything()["events"]]
    assert moves == ["dispatched", "running"]


def test_a_heartbeat_of_fenced_attempts_reports_what_to_stop(story):
    lost, ended_elsewhere, running = story.claim(3)
    story.record(story.lost(lost), story.succeeded(ended_elsewhere, worker_id="w2"))
    labels = story.beat(lost, ended_elsewhere, running, worker_id="w1")
    assert sorted(labels) == [f"{story.run.slug}-g000000-r{index}-a1" for index in (0, 1)]
    assert story.attempt(lost)["state"] == "lost"


def test_attempts_that_ended_by_themselves_are_not_stopped(story):
    done, failed, superseded = attempts = story.claim(3)
    story.record(story.succeeded(done), story.failed(failed), story.lost(superseded))
    successor = wait_until(story.claim, what="the retries")
    story.record(*(story.succeeded(attempt, worker_id="w2") for attempt in successor))
    story.record(story.succeeded(superseded))
    assert story.attempt(superseded)["state"] == "superseded"
    assert story.beat(*attempts) == []


def test_a_heartbeat_of_an_old_attempt_does_not_touch_its_successor(story):
    first = story.claim_one()
    story.record(story.lost(first))
    second = story.claim_one()
    assert second.rollout_id == first.rollout_id
    story.beat(first)
    assert story.attempt(second)["state"] == "dispatched"
    assert story.rollout(second)["state"] == "dispatched"


def test_heartbeats_of_unknown_attempts_are_harmless(story):
    attempt = story.claim_one()
    stranger = Heartbeat(worker_id="w", sequence=1)
    assert transact(story.engine, lambda c: keep_alive(c, [stranger], lease_s=60)) == []
    assert story.attempt(attempt)["worker_id"] is None


def test_an_attempt_is_silent_when_its_lease_ran_out(story):
    one, other = story.claim(2)
    story.beat(one, other, lease_s=60)
    assert silent(story) == []
    age(story, [one], lease_until=61)
    (found,) = silent(story)
    assert (found.rollout_id, found.attempt_no) == (one.rollout_id, 1)
    assert found.worker_id == "w1"
    assert found.label == f"{story.run.slug}-g000000-r0-a1"


def test_a_lease_is_not_held_against_a_worker_whose_words_were_not_read_yet(story):
    attempt = story.claim_one()
    story.beat(attempt, lease_s=60)
    age(story, [attempt], lease_until=70)
    assert silent(story, read_s_ago=30) == []
    assert len(silent(story, read_s_ago=5)) == 1


def test_attempts_that_ended_are_never_silent(story):
    attempts = story.claim(4)
    story.record(story.succeeded(attempts[0]), story.failed(attempts[1]), story.lost(attempts[2]))
    age(story, attempts, lease_until=1000)
    assert [found.rollout_id for found in silent(story)] == [attempts[3].rollout_id]


def test_the_longest_silence_is_judged_first_and_no_more_than_asked(story):
    attempts = story.claim(3)
    for number, attempt in enumerate(attempts):
        age(story, [attempt], lease_until=100 + number)
    assert [found.rollout_id for found in silent(story, most=2)] == [
        attempts[2].rollout_id,
        attempts[1].rollout_id,
    ]


def test_a_request_that_has_left_its_queue_unannounced_is_an_orphan(story):
    attempt = story.claim_one()
    age(story, [attempt], dispatched_at=60)
    assert silent(story, departed_s_ago=None) == []
    assert silent(story, departed_s_ago=90) == []
    assert len(silent(story, departed_s_ago=30)) == 1


def test_a_request_may_be_published_a_moment_after_its_commit(story):
    attempt = story.claim_one()
    age(story, [attempt], dispatched_at=33)
    assert silent(story, departed_s_ago=30, grace_s=5) == []
    assert len(silent(story, departed_s_ago=25, grace_s=5)) == 1


def test_a_request_that_waits_in_its_queue_is_never_lost_unless_the_broker_drops_it(story):
    attempt = story.claim_one()
    age(story, [attempt], dispatched_at=1000, lease_until=1000)
    assert silent(story, expire=False) == []
    assert len(silent(story, expire=True)) == 1


def test_queues_in_flight_say_up_to_which_dispatch_their_requests_started(engine):
    StoredRun(engine, queue="idle")
    gpu, other = StoredRun(engine, n=3, queue="gpu"), StoredRun(engine, queue="gpu")
    early, late = gpu.claim(1) + gpu.claim(1)
    last = other.claim_one()
    waiting = StoredRun(engine, queue="cpu")
    waiting.claim_one()
    gpu.beat(early)
    gpu.beat(late)
    for story, attempt, s_ago in ((gpu, early, 90), (gpu, late, 60), (other, last, 30)):
        age(story, [attempt], dispatched_at=s_ago)
    cpu_queue, gpu_queue = sorted(transact(engine, queues_in_flight))
    assert (cpu_queue.queue, cpu_queue.run_ids) == ("cpu", [waiting.run.run_id])
    assert cpu_queue.started_up_to is None
    assert sorted(gpu_queue.run_ids) == sorted([gpu.run.run_id, other.run.run_id])
    assert gpu_queue.started_up_to == gpu.attempt(late)["dispatched_at"]


def test_what_a_worker_holds_is_no_orphan(story):
    attempt = story.claim_one()
    story.beat(attempt, phase="reserved")
    age(story, [attempt], dispatched_at=60)
    assert silent(story, departed_s_ago=30) == []


def test_workers_are_listed_with_what_they_said(story):
    attempt = story.claim_one()
    story.beat(attempt, worker_id="w7")
    (process,) = transact(story.engine, list_processes)
    assert (process.process_id, process.kind) == ("w7", "worker")
    assert (process.capacity, process.in_flight, process.stopping) == (10, 1, False)
    assert (process.queues, process.base_urls) == ((), ())
    takes = {"queues": ("rollouts", "gpu"), "base_urls": ("https://models.example/v1",)}
    beat = Heartbeat(worker_id="w7", sequence=2, capacity=10, **takes)
    transact(story.engine, lambda c: keep_alive(c, [beat], lease_s=30))
    (process,) = transact(story.engine, list_processes)
    assert {"queues": process.queues, "base_urls": process.base_urls} == takes
    assert process.silent_s < 60
