"""The faults themselves: each harms a running deployment once and returns when the harm is done.

Drawn by tests one by one and by the campaign in a seeded order. Whatever is random is drawn from
the generator that is passed in. Must not: judge the outcome.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from random import Random

from kombu import Connection

from benchmarks.faults import controller
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.fleet import Member
from pipeline.contract.messages import COMPLETION_QUEUE, HEARTBEAT_QUEUE, TASK_RUN
from pipeline.contract.run import DEFAULT_REQUEST_QUEUE
from pipeline.queue.broker import broker_of
from pipeline.queue.celery_app import make_celery_app
from pipeline.settings import load_settings

Injection = Callable[[Deployment, Random], None]

#: What no decoder of ours takes for a message.
GARBAGE = (b"no frame", b"\x00\xff" * 40, b"RPC1\x00\x00\x00\x04null", b"{}", b"", b"[1, 2")
#: What Celery takes for a task of ours, and no worker for a request.
NO_REQUESTS = ("no JSON", '{"schema_version": 99}', "[]")


def kill_worker(deployment: Deployment, random: Random) -> None:
    """C1: `kill -9` of a worker; the supervisor starts it again."""
    random.choice(deployment.workers).process.kill()


def replace_worker(deployment: Deployment, random: Random) -> Member:
    """C2: SIGTERM of a worker, once another is there; returns the one that drains."""
    leaving = random.choice(deployment.workers)
    leaving.keep = False
    deployment.add_worker()
    deployment.wait_ready()
    leaving.process.signal(signal.SIGTERM)
    return leaving


def freeze_worker(deployment: Deployment, random: Random) -> None:
    """C3: SIGSTOP of a worker until its leases are over, then SIGCONT."""
    lease = deployment.size.lease
    _during(frozen_worker(deployment, random), 1.5 * lease.lease_s + lease.grace_s)


@contextmanager
def frozen_worker(deployment: Deployment, random: Random) -> Iterator[Member]:
    """C3, as long as the caller likes."""
    frozen = random.choice(deployment.workers)
    frozen.process.signal(signal.SIGSTOP)
    try:
        yield frozen
    finally:
        frozen.process.signal(signal.SIGCONT)


def lose_messages(deployment: Deployment, random: Random) -> None:
    """C4: the broker runs on and has nothing any more."""
    deployment.broker.lose_messages()


def restart_broker_empty(deployment: Deployment, random: Random) -> None:
    """C5: `kill -9` of the broker, and a new one that knows nothing."""
    with absent_broker(deployment):
        pass


@contextmanager
def absent_broker(deployment: Deployment) -> Iterator[None]:
    """C6: no broker, and afterwards an empty one."""
    deployment.broker.kill()
    try:
        yield
    finally:
        deployment.broker.forget()
        deployment.broker.start()


@contextmanager
def hanging_broker(deployment: Deployment) -> Iterator[None]:
    """C6, the other way: the broker accepts connections and answers nobody."""
    deployment.broker.pause()
    try:
        yield
    finally:
        deployment.broker.resume()


def kill_controller_before_ack(deployment: Deployment, random: Random) -> None:
    """C7: the collector dies between commit and acknowledgement."""
    kill_controller_at(deployment, f"{controller.BEFORE_ACK}:{random.randint(1, 3)}")


def kill_controller_before_commit(deployment: Deployment, random: Random) -> None:
    """C8: the collector dies with everything written and nothing committed."""
    kill_controller_at(deployment, f"{controller.BEFORE_COMMIT}:{random.randint(1, 3)}")


def kill_controller_before_publish(deployment: Deployment, random: Random) -> None:
    """C9: the dispatcher dies with attempts committed and nothing, or half, published."""
    place = random.choice((controller.BEFORE_PUBLISH, controller.HALF_PUBLISHED))
    kill_controller_at(deployment, f"{place}:1")


def kill_controller_at(deployment: Deployment, *places: str, timeout_s: float = 20) -> Member:
    """Put a controller in the place of those that run; each of its lives ends where it is told to.

    Returns it when it has died so often; that it lives again, as an ordinary one, is the
    supervisor's business. A run that ends before it gets there ends the waiting too.

    Args:
        deployment: Where.
        places: `PLACE:N` of `benchmarks.faults.controller`.
        timeout_s: Longest wait for each death.
    """
    before = deployment.controllers
    doomed = deployment.add_controller(*({controller.DIE_VARIABLE: place} for place in places))
    for member in before:
        deployment.fleet.retire(member)
    with suppress(TimeoutError):
        for number, place in enumerate(places):
            deployment.wait_until(
                lambda number=number: len(doomed.deaths) > number,
                what=f"the death {place}",
                timeout_s=timeout_s,
            )
        deployment.wait_until(doomed.is_alive, what="its next life")
    for _ in range(deployment.size.controllers - 1):
        deployment.add_controller()
    return doomed


def restart_store(deployment: Deployment, random: Random) -> None:
    """C10: PostgreSQL stops immediately, every transaction cut, and comes back."""
    deployment.store.stop_immediately()
    deployment.store.start()


def send_garbage(deployment: Deployment, random: Random) -> None:
    """C12: messages that nobody can read, among those that everybody waits for."""
    with Connection(deployment.broker.url) as connection:
        producer = connection.Producer()
        for queue in (COMPLETION_QUEUE, HEARTBEAT_QUEUE, DEFAULT_REQUEST_QUEUE):
            for body in GARBAGE:
                producer.publish(
                    body,
                    routing_key=queue,
                    content_type="application/x-garbage",
                    content_encoding="binary",
                )
    settings = load_settings(overrides={"broker": {"url": deployment.broker.url}})
    app = make_celery_app(broker_of(settings))
    for body in NO_REQUESTS:
        app.send_task(TASK_RUN, args=(body,), ignore_result=True)
    app.close()


def storm(deployment: Deployment, random: Random) -> None:
    """C15: for a while nearly every call gets a 429, and some never an answer."""
    deployment.model.disturb(rate_limited_s=3.0, rate_limited_share=0.8, silent_share=0.02)
    time.sleep(3.0)
    deployment.model.disturb()


#: What the campaign draws from, by the name that figures carry.
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
}


def _during(fault: AbstractContextManager[object], for_s: float) -> None:
    with fault:
        time.sleep(for_s)


def _drained(deployment: Deployment, random: Random) -> None:
    leaving = replace_worker(deployment, random)
    leaving.process.wait(120)
