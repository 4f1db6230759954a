"""A result that waits for its broker keeps its lease: heartbeats list it until it is sent."""

import threading
from uuid import uuid4

import pytest
from fixtures.waiting import wait_until

from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import Completion
from pipeline.queue.payloads import FolderPayloads
from workers.process.outbox import Outbox


class AbsentBroker:
    """A publisher whose broker comes when it is told to."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.sent: list[Completion] = []

    def send_completions(self, completions):
        if not self.is_there.is_set():
            raise QueueUnavailable("Nobody answers.")
        self.sent += completions

    def close(self) -> None:
        pass


@pytest.fixture
def broker() -> AbsentBroker:
    return AbsentBroker()


@pytest.fixture
def outbox(broker, tmp_path):
    outbox = Outbox(
        broker,
        FolderPayloads(tmp_path / "payloads"),
        inline_max_bytes=1000,
        spool=tmp_path / "spool",
    )
    outbox.start()
    yield outbox
    broker.is_there.set()
    outbox.close(timeout_s=5)


def completion() -> Completion:
    return Completion(
        run_id=uuid4(),
        group_id=uuid4(),
        rollout_id=uuid4(),
        attempt_no=3,
        label="math-g000000-r0-a3",
        worker_id="w",
        outcome="succeeded",
    )


def test_a_result_that_waits_for_its_broker_is_listed_until_it_is_sent(broker, outbox):
    waiting = completion()
    outbox.put(waiting)
    assert outbox.beats() == ()  # no news yet
    (beat,) = wait_until(outbox.beats, what="the heartbeat to list it")
    assert (beat.rollout_id, beat.attempt_no) == (waiting.rollout_id, 3)
    broker.is_there.set()
    wait_until(lambda: not outbox.beats(), what="it to be sent")
    assert broker.sent == [waiting]
