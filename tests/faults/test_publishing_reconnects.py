"""A publisher outlives its broker: it says so while there is none, and goes on with the next."""

from uuid import uuid4

import pytest
import redis
from fixtures.short_folders import short_folder

from benchmarks.faults.servers import RedisServer
from pipeline.contract.errors import QueueUnavailable
from pipeline.contract.messages import RolloutRequest
from pipeline.queue.broker import Broker, broker_of
from pipeline.queue.requests import RequestPublisher


@pytest.fixture
def redis_server():
    with short_folder() as folder:
        server = RedisServer(folder)
        server.start()
        yield server
        server.close()


@pytest.fixture
def broker(redis_server, make_settings) -> Broker:
    return broker_of(make_settings(broker={"url": redis_server.url}))


def request_of() -> RolloutRequest:
    return RolloutRequest(
        run="math",
        run_id=uuid4(),
        group_id=uuid4(),
        group_no=0,
        rollout_id=uuid4(),
        rollout_index=0,
        n=1,
        attempt_no=1,
        label="math-g000000-r0-a1",
        prompt={"prompt": "?"},
        agent="single_turn",
    )


def test_requests_are_published_again_after_the_broker_was_away(broker, redis_server):
    publisher = RequestPublisher(broker, expires_s=60)
    publisher.publish([request_of()], queue="rollouts")
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(QueueUnavailable):
            publisher.publish([request_of()], queue="rollouts")
    redis_server.start()
    publisher.publish([request_of()] * 3, queue="rollouts")
    with broker.connect() as connection:
        assert broker.depth(connection, "rollouts") == 3
    publisher.close()


def test_workers_are_told_to_stop_attempts_again_after_the_broker_was_away(broker, redis_server):
    publisher = RequestPublisher(broker, expires_s=60)
    publisher.stop_attempts(["math-g000000-r0-a1"])
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(QueueUnavailable):
            publisher.stop_attempts(["math-g000000-r0-a1"])
    redis_server.start()
    publisher.stop_attempts(["math-g000000-r0-a1"])
    publisher.close()


def test_stop_commands_go_over_a_kept_connection(broker, redis_server):
    publisher = RequestPublisher(broker, expires_s=60)
    publisher.stop_attempts(["math-g000000-r0-a1"])
    client = redis.Redis.from_url(redis_server._services.redis_client_url)
    before = client.info("stats")["total_connections_received"]
    for number in range(5):
        publisher.stop_attempts([f"math-g000000-r{number}-a1"])
    assert client.info("stats")["total_connections_received"] == before
    client.close()
    publisher.close()
