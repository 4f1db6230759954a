"""A run whose queue no worker serves, while workers of other queues die."""

from __future__ import annotations

from fixtures.collectors import StoredCollector
from fixtures.stored_run import StoredRun
from sqlalchemy import text

from pipeline.contract.messages import Heartbeat
from pipeline.queue.broker import broker_of
from pipeline.queue.payloads import open_payloads
from pipeline.reconciler import Reconciler
from pipeline.store.engine import transact
from pipeline.store.leases import keep_alive

STRANGER = Heartbeat(worker_id="w9", sequence=1, capacity=10)


def test_lost_requests_are_never_blamed_for_the_death_of_any_worker(
    engine, redis_place, make_settings
):
    lease = {"grace_s": 0.0, "poll_s": 0.01, "lease_s": 30.0}
    settings = make_settings(redis_place, lease=lease)
    reconciler = Reconciler(engine, broker_of(settings), open_payloads(settings), settings)
    story = StoredRun(engine, queue="unserved", max_lost=2)
    collector = StoredCollector(engine)
    for attempt_no in range(1, 6):
        attempt = story.claim_one()
        assert attempt.attempt_no == attempt_no
        # A worker of another queue dies meanwhile.
        transact(engine, lambda c: keep_alive(c, [STRANGER], lease_s=30))
        for change in (
            "UPDATE processes SET last_seen_at = now() - interval '15 s' WHERE process_id = 'w9'",
            "UPDATE attempts SET dispatched_at = now() - interval '20 s'",
        ):
            transact(engine, lambda c, change=change: c.execute(text(change)))
        for _ in range(3):
            collector.catch_up()
            reconciler.step()
        assert story.attempt(attempt)["error_code"] == "never_held"
        assert story.states() == {"queued": 1}
    reconciler.close()
