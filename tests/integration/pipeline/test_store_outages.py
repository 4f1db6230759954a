"""The collector keeps what it has read while the store is away."""

from collections.abc import Iterator

import psycopg
import pytest
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from sqlalchemy import Engine, event

from pipeline.collector import Collector
from pipeline.contract.errors import StoreUnavailable
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import OutcomeConsumer, OutcomePublisher
from pipeline.queue.markers import MarkerSender
from pipeline.store.engine import open_engine


@pytest.fixture
def absent(database_url: str) -> Iterator[tuple[Engine, list[bool]]]:
    """An engine of its own, and a list that holds something while the store is away."""
    away: list[bool] = []
    engine = open_engine(database_url)

    @event.listens_for(engine, "do_connect")
    def refuse(*_: object) -> None:
        if away:
            raise psycopg.OperationalError("the database system is shutting down")

    yield engine, away
    engine.dispose()


def test_outcomes_that_were_read_before_an_outage_are_stored_after_it(
    engine: Engine, absent, redis_place, make_settings
):
    story = StoredRun(engine, n=2)
    settings = make_settings(redis_place)
    publisher = OutcomePublisher(broker_of(settings))
    publisher.send_completions([story.succeeded(attempt) for attempt in story.claim()])
    publisher.close()
    its_engine, away = absent
    away.append(True)
    consumer = OutcomeConsumer(broker_of(settings))
    collector = Collector(
        its_engine,
        consumer,
        settings,
        markers=MarkerSender(OutcomePublisher(broker_of(settings))),
        stop_attempts=lambda labels: None,
    )
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            wait_until(collector.step, what="a delivery")
    away.clear()

    def stored() -> bool:
        collector.step()
        return story.states() == {"succeeded": 2}

    wait_until(stored, what="the outcomes", seen=story.states)
    collector.close()
