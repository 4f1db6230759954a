"""A worker takes no more requests than it has free places, from RabbitMQ few more."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
from fixtures.deployment import VISIBILITY_S

from pipeline.queue.broker import broker_of

QUEUES = ("rollouts", "more", "most")
PLACES, PER_QUEUE = 4, 4


@pytest.mark.parametrize("broker_place", ["sqs"], indirect=True)
def test_no_request_runs_twice_though_attempts_outlast_the_visibility(deployment):
    deployment.start_controller()
    deployment.start_worker(queues=QUEUES, concurrency=PLACES)
    for queue in QUEUES:
        deployment.submit(PER_QUEUE, run=queue, queue=queue)
    requested = len(QUEUES) * PER_QUEUE
    deployment.wait_states({"running": PLACES, "dispatched": requested - PLACES})
    # What the full worker had reserved would be delivered again to the next one.
    time.sleep(2 * VISIBILITY_S)
    deployment.start_worker(queues=QUEUES, concurrency=requested - PLACES)
    deployment.wait_states({"running": requested})
    deployment.gate.touch()
    deployment.wait_states({"succeeded": requested})
    assert set(Counter(deployment.said("started")).values()) == {1}
    assert len(deployment.said("started")) == requested
    broker = broker_of(deployment.settings)
    with broker.connect() as connection:
        left = [broker.depth(connection, queue, with_received=True) for queue in QUEUES]
    assert left == [0, 0, 0], "started requests are deleted"


@pytest.mark.parametrize("broker_place", ["amqp"], indirect=True)
def test_a_full_worker_leaves_all_requests_but_one_to_others(deployment):
    deployment.start_controller()
    deployment.start_worker(concurrency=8)
    deployment.submit(24)
    deployment.wait_states({"running": 8, "dispatched": 16})
    deployment.start_worker(concurrency=24)
    deployment.wait_states({"running": 23, "dispatched": 1})
    deployment.gate.touch()
    deployment.wait_states({"succeeded": 24})
    assert sorted(Counter(deployment.said("started")).values()) == [1] * 24


@pytest.mark.parametrize("broker_place", ["amqp"], indirect=True)
def test_a_full_worker_that_is_told_to_stop_returns_what_it_has_not_started(deployment):
    deployment.start_controller()
    leaving = deployment.start_worker(concurrency=32)
    deployment.submit(40)
    deployment.wait_states({"running": 32, "dispatched": 8})
    deployment.start_worker(concurrency=16)
    deployment.wait_states({"running": 36, "dispatched": 4})
    leaving.send(signal.SIGTERM)
    deployment.wait_states({"running": 40}, timeout_s=15.0)  # the lease would take 30 s
    deployment.gate.touch()
    assert leaving.wait_end() == 0
    deployment.wait_states({"succeeded": 40})
    assert sorted(Counter(deployment.said("started")).values()) == [1] * 40
    (attempts,) = deployment.rows("SELECT count(*) AS n FROM attempts")
    assert attempts == {"n": 40}
