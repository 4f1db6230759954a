"""What SQS may do with any message: deliver it twice, late, out of order, after its deletion.

At the level of queue and store, against moto; the processes around them are the same as elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from fixtures.waiting import wait_until
from kombu import Producer

from pipeline.collector import Collector
from pipeline.contract.messages import Completion
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.completions import Delivery, OutcomeConsumer, OutcomePublisher
from pipeline.queue.markers import MarkerSender
from pipeline.queue.sqs_transport import DELIVERY_COUNT

#: Long enough never to matter, and short enough to be waited for.
LONG_S, SHORT_S = 60, 1


class CountingConsumer(OutcomeConsumer):
    """Counts what it was given; it may die before its acknowledgements reach the broker."""

    def __init__(self, broker: Broker, *, forgets_to_ack: bool = False) -> None:
        super().__init__(broker)
        self.taken = 0
        self._forgets_to_ack = forgets_to_ack

    def ack(self, delivery: Delivery) -> None:
        self.taken += len(delivery.completions)
        if not self._forgets_to_ack:
            super().ack(delivery)


@pytest.fixture
def sqs_settings(sqs_place, make_settings):
    return make_settings(sqs_place)


@pytest.fixture
def visibility_s() -> int:
    """Seconds after which SQS delivers again what was not deleted."""
    return LONG_S


@pytest.fixture
def broker(sqs_settings, visibility_s) -> Broker:
    broker = broker_of(sqs_settings)
    options = {**broker.transport_options, "visibility_timeout": visibility_s}
    return replace(broker, transport_options=options)


@pytest.fixture
def publisher(broker):
    publisher = OutcomePublisher(broker)
    yield publisher
    publisher.close()


@pytest.fixture
def make_collector(engine, broker, sqs_settings):
    made: list[Collector] = []

    def make(**options: Any) -> tuple[Collector, CountingConsumer]:
        consumer = CountingConsumer(broker, **options)
        collector = Collector(
            engine,
            consumer,
            sqs_settings,
            markers=MarkerSender(OutcomePublisher(broker)),
            stop_attempts=lambda labels: None,
        )
        made.append(collector)
        return collector, consumer

    yield make
    for collector in made:
        collector.close()


def take(collector: Collector, consumer: CountingConsumer, count: int) -> None:
    """Let the collector work until it has taken so many completions."""

    def step() -> bool:
        if consumer.taken < count:
            collector.step()
        return consumer.taken >= count

    wait_until(step, timeout_s=40, what=f"{count} completions", seen=lambda: consumer.taken)


def test_messages_that_are_delivered_twice_change_nothing(engine, publisher, make_collector):
    story = StoredRun(engine, n=4)
    completions = [story.succeeded(attempt) for attempt in story.claim()]
    collector, consumer = make_collector()
    for completion in completions:
        publisher.send_completions([completion])
    take(collector, consumer, 4)
    before = story.everything()
    assert story.states() == {"succeeded": 4}
    for completion in reversed(completions):
        publisher.send_completions([completion])
    take(collector, consumer, 8)
    assert story.everything() == before


def test_the_answer_of_an_earlier_attempt_may_come_after_that_of_a_later_one(
    engine, publisher, make_collector
):
    story = StoredRun(engine, n=1)
    early = story.claim_one()
    story.record(story.lost(early))
    late = wait_until(story.claim, what="the second attempt")[0]
    collector, consumer = make_collector()
    publisher.send_completions([story.succeeded(late, reward=1.0)])
    take(collector, consumer, 1)
    publisher.send_completions([story.succeeded(early, reward=0.0)])
    take(collector, consumer, 2)
    rollout = story.rollout(late)
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 1.0)
    assert rollout["winner_attempt_no"] == late.attempt_no
    assert story.attempt(early)["state"] == "superseded"


def test_a_request_that_two_workers_got_has_the_outcome_of_the_first(
    engine, publisher, make_collector
):
    story = StoredRun(engine, n=1)
    attempt = story.claim_one()
    collector, consumer = make_collector()
    for worker_id, reward in (("first", 0.25), ("second", 0.75)):
        publisher.send_completions([story.succeeded(attempt, reward, worker_id=worker_id)])
        take(collector, consumer, 1 if worker_id == "first" else 2)
    assert story.rollout(attempt)["reward"] == 0.25
    assert story.attempt(attempt)["worker_id"] == "first"
    assert story.groups()[0]["n_succeeded"] == 1


@pytest.mark.parametrize("visibility_s", [SHORT_S])
def test_messages_that_come_back_after_their_commit_change_nothing(
    engine, publisher, make_collector
):
    story = StoredRun(engine, n=4)
    completions: list[Completion] = [story.succeeded(attempt) for attempt in story.claim()]
    for completion in completions:
        publisher.send_completions([completion])
    dying, its_consumer = make_collector(forgets_to_ack=True)
    take(dying, its_consumer, 4)
    before = story.everything()
    collector, consumer = make_collector()
    take(collector, consumer, 4)
    assert story.everything() == before
    assert story.groups()[0]["n_succeeded"] == 4


@pytest.mark.parametrize("visibility_s", [SHORT_S])
def test_a_message_that_comes_again_says_how_often_it_came_before(broker):
    queue = broker.queue("again")
    with broker.connect() as connection:
        Producer(connection).publish({}, routing_key=queue.name, exchange="", declare=[queue])
        bound = queue(connection.default_channel)
        counts: list[int] = []

        def came_thrice() -> bool:
            if (message := bound.get()) is not None:
                counts.append(message.headers.get(DELIVERY_COUNT, 0))
            return len(counts) == 3

        wait_until(came_thrice, 20, seen=lambda: counts)
    assert counts == [0, 1, 2]
