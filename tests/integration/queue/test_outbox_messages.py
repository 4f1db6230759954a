"""The outbox on every broker: all completions arrive, whatever their size, or stay in the spool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.messages import completion_of
from fixtures.waiting import wait_until

from pipeline.contract.errors import ErrorClass, QueueUnavailable
from pipeline.contract.messages import Completion, ErrorRecord, RewardPart
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.completions import OutcomeConsumer, OutcomePublisher
from pipeline.queue.payloads import FolderPayloads
from pipeline.settings import Settings
from workers.process.outbox import Outbox

AWAY = BrokerPlace("redis", "redis://127.0.0.1:1/0")


@pytest.fixture
def make_outbox(tmp_path: Path) -> Iterator[Callable[[Broker], Outbox]]:
    made: list[Outbox] = []

    def make(broker: Broker) -> Outbox:
        outbox = Outbox(
            OutcomePublisher(broker),
            FolderPayloads(tmp_path / "payloads"),
            inline_max_bytes=10**9,
            spool=tmp_path / "spool",
        )
        made.append(outbox)
        return outbox

    yield make
    for outbox in made:
        if outbox.is_alive():
            outbox.close(timeout_s=0)


def failed(index: int, *, detail_chars: int) -> Completion:
    return completion_of(
        index,
        body=b"",
        outcome="failed",
        stop_reason=None,
        reward=None,
        error=ErrorRecord(
            error_class=ErrorClass.AGENT_BUG,
            code="raised",
            message="It raised.",
            detail='File "agent.py", line 1\n' * (detail_chars // 24),
        ),
    )


def receive(broker: Broker, count: int) -> list[Completion]:
    consumer, received = OutcomeConsumer(broker), []

    def enough() -> bool:
        try:
            delivery = consumer.receive(most=256, linger_s=0.05, timeout_s=0.2)
        except QueueUnavailable:
            # RabbitMQ may refuse to declare a new queue twice at once; collectors try again.
            return False
        consumer.ack(delivery)
        received.extend(delivery.completions)
        return len(received) >= count

    wait_until(enough, 60, what=f"{count} completions", seen=lambda: len(received))
    consumer.close()
    return received


def test_many_failures_with_long_tracebacks_arrive_in_several_messages(broker, make_outbox):
    outbox = make_outbox(broker)
    sent = [failed(index, detail_chars=30_000) for index in range(64)]
    for completion in sent:
        outbox.put(completion)
    outbox.start()
    assert receive(broker, 64) == sent
    wait_until(lambda: not outbox.beats(), what="an empty outbox")


@pytest.mark.parametrize("broker_place", ["sqs"], indirect=True)
def test_a_body_that_fits_into_no_message_goes_by_reference(broker, make_outbox):
    outbox = make_outbox(broker)
    outbox.put(completion_of(1, body=bytes(2 * 2**20)))
    outbox.start()
    (received,) = receive(broker, 1)
    assert received.body == b""
    assert received.body_uri is not None
    assert received.body_bytes == 2 * 2**20


@pytest.mark.parametrize("broker_place", ["sqs"], indirect=True)
def test_an_outcome_that_fits_into_no_message_becomes_a_failure(broker, make_outbox):
    parts = tuple(RewardPart(name=f"part-{index}", value=1.0) for index in range(20_000))
    outbox = make_outbox(broker)
    outbox.put(completion_of(1, body=b"", reward_parts=parts))
    outbox.start()
    (received,) = receive(broker, 1)
    assert (received.outcome, received.key) == ("failed", completion_of(1).key)
    assert received.error is not None
    assert received.error.code == "completion_too_large"


def test_spooled_completions_outlive_workers_that_cannot_send_them(
    broker: Broker,
    make_outbox: Callable[[Broker], Outbox],
    make_settings: Callable[..., Settings],
    tmp_path: Path,
):
    away = broker_of(make_settings(AWAY, broker={"connect_timeout_s": 0.5}))
    sent = [completion_of(index) for index in range(3)]
    for number, completion in enumerate(sent):
        outbox = make_outbox(away)
        # The next worker begins with the spooled completions of the workers before.
        outbox.put(completion)
        outbox.start()
        outbox.close(timeout_s=0)
        assert len(list((tmp_path / "spool").iterdir())) == number + 1
    last = make_outbox(broker)
    last.start()
    received = receive(broker, 3)
    assert sorted(received, key=lambda completion: completion.label) == sent
    last.close(timeout_s=10)
    assert list((tmp_path / "spool").iterdir()) == []
