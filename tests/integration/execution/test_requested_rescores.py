"""Requested rescores are rows: a lost request is sent again, a verdict ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import Completion, ErrorRecord, RescoreRequest, RewardPart
from pipeline.rescorer import RescoreDispatcher
from pipeline.store.engine import transact
from pipeline.store.rescore_requests import (
    RescoreCount,
    count_rescores,
    end_rescores,
    request_rescores,
)
from pipeline.store.rescores import record_rescores


class Broker:
    """Takes requests as `RequestPublisher` does, and loses them."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, RescoreRequest]] = []
        self.is_away = False
        self.is_narrow = False

    def publish(self, requests: Sequence[RescoreRequest], *, queue: str) -> list[RescoreRequest]:
        if self.is_away:
            raise QueueUnavailable("away")
        if self.is_narrow:
            return list(requests)
        self.sent += [(queue, request) for request in requests]
        return []


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    story = StoredRun(engine, prompts=3, n=1)
    story.record(*(story.succeeded(attempt) for attempt in story.claim()))
    return story


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def dispatcher(engine: Engine, broker: Any, make_settings: Any, redis_place: Any) -> Any:
    return RescoreDispatcher(engine, broker, make_settings(redis_place))


def ask(story: StoredRun, *, awaited: bool = True, queue: str = "rollouts") -> int:
    return transact(
        story.engine,
        lambda c: request_rescores(
            c, story.run, "judge", error_class=None, queue=queue, awaited=awaited
        ),
    )


def count(story: StoredRun) -> RescoreCount:
    return transact(story.engine, lambda c: count_rescores(c, story.run, "judge"))


def end_leases(story: StoredRun) -> None:
    statement = text("UPDATE rescores SET lease_until = now() - interval '1 second'")
    transact(story.engine, lambda c: c.execute(statement))


def answer(story: StoredRun, request: RescoreRequest, *, fails: bool = False) -> None:
    said: dict[str, Any] = {"outcome": "succeeded", "reward": 0.5}
    if fails:
        error = ErrorRecord(error_class="reward_error", code="away", message="The judge is away.")
        said = {"outcome": "failed", "error": error}
    part = RewardPart(name="judge", value=None if fails else 0.5, status="error" if fails else "ok")
    completion = Completion(
        **request.identity, worker_id="w", purpose="rescore", reward_parts=(part,), **said
    )
    assert transact(story.engine, lambda c: record_rescores(c, [completion])) == []


def test_each_requested_rescore_is_sent_once_until_its_lease_ends(story, dispatcher, broker):
    assert ask(story) == 3
    assert (dispatcher.step(), dispatcher.step()) == (3, 0)
    assert {queue for queue, _ in broker.sent} == {"rollouts"}
    assert {request.reward for _, request in broker.sent} == {"judge"}
    assert count(story) == RescoreCount(0, 0, 3, None)


def test_a_request_that_the_broker_lost_is_sent_again(story, dispatcher, broker):
    ask(story)
    dispatcher.step()
    answer(story, broker.sent[0][1])
    end_leases(story)
    assert dispatcher.step() == 2
    for _, request in broker.sent[3:]:
        answer(story, request)
    assert count(story) == RescoreCount(3, 0, 0, None)
    end_leases(story)
    assert dispatcher.step() == 0


def test_a_request_that_is_lost_every_time_ends(story, dispatcher, broker):
    ask(story)
    for _ in range(5):
        assert dispatcher.step() == 3
        end_leases(story)
    assert dispatcher.step() == 0
    assert (count(story).failed, count(story).waiting) == (3, 0)


def test_requests_wait_in_the_store_while_the_broker_is_away(story, dispatcher, broker):
    ask(story)
    broker.is_away = True
    for _ in range(9):
        with pytest.raises(QueueUnavailable):
            dispatcher.step()
    broker.is_away = False
    assert dispatcher.step() == 3


def test_a_request_too_large_for_the_broker_ends_with_the_reason(story, dispatcher, broker):
    ask(story)
    broker.is_narrow = True
    dispatcher.step()
    assert count(story) == RescoreCount(0, 3, 0, "its prompt is too large")


def test_a_failed_verdict_is_kept_for_the_command_that_waits(story, dispatcher, broker):
    ask(story)
    dispatcher.step()
    for number, (_, request) in enumerate(broker.sent):
        answer(story, request, fails=number == 0)
        answer(story, request)
    assert count(story) == RescoreCount(2, 1, 0, "reward_error (away): The judge is away.")
    transact(story.engine, lambda c: end_rescores(c, story.run, "judge", keep_open=False))
    assert story.rows("SELECT * FROM rescores") == []


def test_nothing_is_kept_of_rescores_that_nobody_waits_for(story, dispatcher, broker):
    ask(story, awaited=False)
    dispatcher.step()
    for _, request in broker.sent:
        answer(story, request)
    assert story.rows("SELECT * FROM rescores") == []


def test_an_interrupted_command_leaves_its_requests_to_the_dispatcher(story, dispatcher, broker):
    ask(story)
    dispatcher.step()
    answer(story, broker.sent[0][1])
    transact(story.engine, lambda c: end_rescores(c, story.run, "judge", keep_open=True))
    assert len(story.rows("SELECT * FROM rescores")) == 2
    for _, request in broker.sent[1:]:
        answer(story, request)
    assert story.rows("SELECT * FROM rescores") == []


def test_a_command_given_again_asks_at_once_and_on_its_own_queue(story, dispatcher, broker):
    ask(story)
    dispatcher.step()
    assert ask(story, queue="rescore.again") == 3
    assert dispatcher.step() == 3
    assert [queue for queue, _ in broker.sent[3:]] == ["rescore.again"] * 3
