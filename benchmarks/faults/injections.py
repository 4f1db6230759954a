"""The faults: each function injects one fault into a running deployment, then returns.

Tests call them one by one, and the campaign in a seeded random order. Random choices use the
generator that is passed in. Must not: judge the outcome.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from random import Random

from benchmarks.faults import controller
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.fleet import Member
from benchmarks.faults.servers import RabbitServer, Resource
from benchmarks.faults.sqs_server import SqsServer
from pipeline.contract.messages import COMPLETION_QUEUE, HEARTBEAT_QUEUE, TASK_RUN
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE
from pipeline.queue.broker import broker_of
from pipeline.queue.celery_app import make_celery_app

Injection = Callable[[Deployment, Random], None]

#: Bytes that our decoders reject.
GARBAGE = (b"no frame", b"\x00\xff" * 40, b"RPC1\x00\x00\x00\x04null", b"{}", b"", b"[1, 2")
#: Task arguments that Celery accepts, but workers reject as requests.
NO_REQUESTS = ("no JSON", '{"schema_version": 99}', "[]")


def kill_worker(deployment: Deployment, random: Random) -> None:
    """C1: `kill -9` of a worker; the supervisor starts it again."""
    random.choice(deployment.workers).process.kill()


def replace_worker(deployment: Deployment, random: Random) -> Member:
    """C2: start a new worker, then SIGTERM of another; returns the one that drains."""
    leaving = random.choice(deployment.workers)
    leaving.keep = False
    deployment.add_worker()
    deployment.wait_ready()
    leaving.process.signal(signal.SIGTERM)
    return leaving


def freeze_worker(deployment: Deployment, random: Random) -> None:
    """C3: SIGSTOP of a worker until its leases have expired, then SIGCONT."""
    lease = deployment.size.lease
    _during(frozen_worker(deployment, random), 1.5 * lease.lease_s + lease.grace_s)


@contextmanager
def frozen_worker(deployment: Deployment, random: Random) -> Iterator[Member]:
    """C3: SIGSTOP of a worker for the duration of the block."""
    frozen = random.choice(deployment.workers)
    frozen.process.signal(signal.SIGSTOP)
    try:
        yield frozen
    finally:
        frozen.process.signal(signal.SIGCONT)


def lose_messages(deployment: Deployment, random: Random) -> None:
    """C4: the broker goes on running but loses all messages."""
    deployment.broker.lose_messages()


def restart_broker_empty(deployment: Deployment, random: Random) -> None:
    """C5: `kill -9` of the broker, and a restart without its data."""
    with absent_broker(deployment):
        pass


@contextmanager
def absent_broker(deployment: Deployment) -> Iterator[None]:
    """C6: no broker during the block, and afterwards an empty one."""
    deployment.broker.kill()
    try:
        yield
    finally:
        deployment.broker.forget()
        deployment.broker.start()


@contextmanager
def hanging_broker(deployment: Deployment) -> Iterator[None]:
    """C6, second form: the broker accepts connections and does not answer."""
    deployment.broker.pause()
    try:
        yield
    finally:
        deployment.broker.resume()


@contextmanager
def alarm(deployment: Deployment, resource: Resource) -> Iterator[None]:
    """C19: RabbitMQ is short of a resource, so it blocks publishers and serves consumers."""
    node = deployment.broker
    assert isinstance(node, RabbitServer)
    node.raise_alarm(resource)
    try:
        yield
    finally:
        node.end_alarm(resource)


def kill_controller_before_ack(deployment: Deployment, random: Random) -> None:
    """C7: the collector dies between commit and acknowledgement."""
    kill_controller_at(deployment, f"{controller.BEFORE_ACK}:{random.randint(1, 3)}")


def kill_controller_before_commit(deployment: Deployment, random: Random) -> None:
    """C8: the collector dies after its writes and before the commit."""
    kill_controller_at(deployment, f"{controller.BEFORE_COMMIT}:{random.randint(1, 3)}")


def kill_controller_before_publish(deployment: Deployment, random: Random) -> None:
    """C9: the dispatcher dies after committing attempts, with none or half of them published."""
    place = random.choice((controller.BEFORE_PUBLISH, controller.HALF_PUBLISHED))
    kill_controller_at(deployment, f"{place}:1")


def kill_controller_at(deployment: Deployment, *places: str, timeout_s: float = 20) -> Member:
    """Replace the running controllers by one whose processes die at the given places.

    Returns the controller after all these deaths, when the supervisor has started it as an ordinary
    one. A timeout is not an error, because the run may end before a place is reached.

    Args:
        deployment: The deployment.
        places: `PLACE:N` of `benchmarks.faults.controller`.
        timeout_s: Longest wait for each death.
    """
    before = deployment.controllers
    replacement = deployment.add_controller(*({controller.DIE_VARIABLE: place} for place in places))
    for member in before:
        deployment.fleet.retire(member)
    with suppress(TimeoutError):
        for number, place in enumerate(places):
            deployment.wait_until(
                lambda number=number: len(replacement.deaths) > number,
                what=f"the death {place}",
                timeout_s=timeout_s,
            )
        deployment.wait_until(replacement.is_alive, what="its next process")
    for _ in range(deployment.size.controllers - 1):
        deployment.add_controller()
    return replacement


def restart_store(deployment: Deployment, random: Random) -> None:
    """C10: immediate shutdown of PostgreSQL, which aborts all transactions, and a restart."""
    deployment.store.stop_immediately()
    deployment.store.start()


def send_garbage(deployment: Deployment, random: Random) -> None:
    """C12: unreadable messages among the valid ones."""
    broker = broker_of(deployment.broker_settings())
    with broker.connect() as connection:
        producer = connection.Producer()
        for queue in (COMPLETION_QUEUE, HEARTBEAT_QUEUE, DEFAULT_REQUEST_QUEUE):
            for body in GARBAGE:
                producer.publish(
                    body,
                    routing_key=queue,
                    content_type="application/x-garbage",
                    content_encoding="binary",
                )
    app = make_celery_app(broker)
    for body in NO_REQUESTS:
        app.send_task(TASK_RUN, args=(body,), ignore_result=True)
    app.close()


def storm(deployment: Deployment, random: Random) -> None:
    """C15: for a while nearly every call gets a 429, and some calls get no answer."""
    deployment.model.disturb(rate_limited_s=3.0, rate_limited_share=0.8, silent_share=0.02)
    time.sleep(3.0)
    deployment.model.disturb()


def refuse_calls(deployment: Deployment, random: Random) -> None:
    """C18: SQS throttles every call for a while, and then finds every token expired."""
    assert isinstance(deployment.broker, SqsServer)
    try:
        for code in ("ThrottlingException", "ExpiredTokenException"):
            deployment.broker.refuse(code)
            time.sleep(deployment.size.lease.lease_s)
    finally:
        deployment.broker.refuse("")


SQS_REFUSES = "C18 SQS throttles, then finds tokens expired"

#: The faults from which the campaign chooses, by their name in the figures.
INJECTIONS: dict[str, Injection] = {
    "C1 kill -9 of a worker": kill_worker,
    "C2 SIGTERM of a worker": lambda deployment, random: _drained(deployment, random),
    "C3 worker frozen beyond its lease": freeze_worker,
    "C4 broker loses its messages": lose_messages,
    "C5 broker killed, empty restart": restart_broker_empty,
    "C6 broker away for 20 s": lambda deployment, random: _during(absent_broker(deployment), 20),
    "C6 broker hangs for 10 s": lambda deployment, random: _during(hanging_broker(deployment), 10),
    "C7 collector dies between commit and ack": kill_controller_before_ack,
    "C8 collector dies before commit": kill_controller_before_commit,
    "C9 dispatcher dies between commit and publish": kill_controller_before_publish,
    "C10 Postgres stopped immediately": restart_store,
    "C12 undecodable messages": send_garbage,
    "C15 storm of 429, silent calls": storm,
    SQS_REFUSES: refuse_calls,
}


#: Faults that cannot happen to a broker, and why.
NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "sqs": {
        "C5 broker killed, empty restart": "SQS keeps its messages during an outage; see C4 and C6"
    },
    "redis": {SQS_REFUSES: "only SQS throttles and has credentials that expire"},
    "rabbitmq": {SQS_REFUSES: "only SQS throttles and has credentials that expire"},
}


def applicable(broker: str) -> dict[str, Injection]:
    """Return the faults that can happen with a broker."""
    refused = NOT_APPLICABLE[broker]
    return {name: inject for name, inject in INJECTIONS.items() if name not in refused}


def _during(fault: AbstractContextManager[object], for_s: float) -> None:
    with fault:
        time.sleep(for_s)


def _drained(deployment: Deployment, random: Random) -> None:
    leaving = replace_worker(deployment, random)
    leaving.process.wait(120)
