"""Two dispatchers share one cap: the second counts what the first took. I7."""

import threading

import pytest
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from sqlalchemy import Engine, text

from pipeline.dispatcher import Dispatcher
from pipeline.queue.broker import broker_of
from pipeline.queue.requests import RequestPublisher

CAP = 10


@pytest.fixture
def make_dispatcher(engine, make_settings, redis_place):
    def make() -> Dispatcher:
        settings = make_settings(redis_place, dispatch={"max_in_flight": CAP, "poll_s": 0.1})
        return Dispatcher(engine, RequestPublisher(broker_of(settings), expires_s=60), settings)

    return make


def test_a_dispatcher_waits_for_the_claims_of_another_and_counts_them(engine, make_dispatcher):
    story = StoredRun(engine, prompts=5, n=8)
    first, second = make_dispatcher(), make_dispatcher()
    with engine.connect() as connection:
        connection.begin()
        first._claim(connection)
        late = threading.Thread(target=second.step)
        late.start()
        wait_until(lambda: waits_for_a_lock(engine), what="the second one to wait")
        connection.commit()
    late.join(20)
    assert not late.is_alive()
    assert story.states() == {"dispatched": CAP, "queued": 40 - CAP}
    for dispatcher in (first, second):
        dispatcher.close()


def waits_for_a_lock(engine: Engine) -> bool:
    query = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with engine.connect() as connection:
        return connection.execute(query).scalar_one() > 0
