"""Requests to workers: published in batches as Celery tasks, by name.

Used by the dispatcher after it has committed the attempts, and by `rollout rescore`. Must not: use
the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from celery import Celery
from kombu import Connection

from pipeline.contract.messages import RescoreRequest, RolloutRequest
from pipeline.contract.policy import POLICIES, Policy
from pipeline.queue.broker import Broker
from pipeline.queue.celery_app import make_celery_app
from pipeline.queue.signing import CANCEL, POLICY, REQUEST

_REPLY_TIMEOUT_S = 1.0

R = TypeVar("R", RolloutRequest, RescoreRequest)


class RequestPublisher:
    """Publishes requests, and sends commands to the workers of a broker.

    Args:
        broker: The broker of the workers.
        expires_s: SQS: age at which a request is dropped instead of delivered, by the clock of SQS.
            The other brokers keep requests until a worker takes them: there the reconciler can tell
            which ones have left the queue.
    """

    def __init__(self, broker: Broker, *, expires_s: float) -> None:
        self._broker = broker
        self._app: Celery = make_celery_app(_with_timeouts(broker))
        self._expires_s = expires_s

    def publish(self, requests: Sequence[R], *, queue: str) -> list[R]:
        """Publish requests to a queue; return those that are too large for this broker.

        Raises:
            QueueUnavailable: The broker does not answer. Some requests may have been published;
                publishing all of them again is safe, because an attempt's outcome counts once.
        """
        name = self._broker.prefix + queue
        signer = self._broker.signer
        options = self._options()
        too_large: list[R] = []
        with (
            self._broker.driver_errors(self._drop_connections),
            self._app.producer_pool.acquire(block=True) as producer,
            producer.batch(),
        ):
            for request in requests:
                message = request.model_dump_json(exclude_defaults=True)
                if not self._fits(message):
                    too_large.append(request)
                    continue
                signature = signer.signature(message, REQUEST)
                self._app.send_task(
                    request.task,
                    args=(message, signature) if signature else (message,),
                    task_id=request.task_id,
                    queue=name,
                    producer=producer,
                    retry=False,
                    timeout=self._broker.network_timeout_s,
                    argsrepr=request.describe(),
                    kwargsrepr="",
                    **options,
                )
        return too_large

    def _options(self) -> dict[str, Any]:
        if self._broker.kind != "sqs":
            return {}
        from pipeline.queue.sqs_transport import expiring

        return {"message_attributes": expiring(self._expires_s)}

    def _fits(self, message: str) -> bool:
        most = self._broker.most_bytes
        # The envelope quotes the JSON once more; a character then takes at most twelve bytes.
        if most is None or len(message) * 12 <= most:
            return True
        return len(json.dumps(message)) <= most

    def stop_attempts(self, labels: Sequence[str]) -> None:
        """Command workers to stop attempts that are no longer theirs.

        Best effort: the result of a worker that misses the command is fenced.
        """
        if not labels:
            return
        self._command("cancel_attempts", {"labels": list(labels)}, "\n".join(labels), CANCEL)

    def announce_policies(self, policies: Sequence[Policy]) -> None:
        """Tell the workers which policies are published.

        Best effort: the announcer repeats it, and each new request carries its run's policy.
        """
        if not policies:
            return
        message = POLICIES.dump_json(list(policies)).decode()
        self._command("learn_policies", {"message": message}, message, POLICY)

    def _command(
        self, method: str, arguments: dict[str, object], signed: str, purpose: bytes
    ) -> None:
        """Send a command to all workers; nothing happens where the broker has no remote control."""
        if not self._broker.has_remote_control:
            return
        with self._broker.driver_errors(self._drop_connections):
            if signature := self._broker.signer.signature(signed, purpose):
                arguments["signature"] = signature
            # Not `control.broadcast`: while the broker is down, its retries would never end.
            with self._app.producer_pool.acquire(block=True) as producer:
                exchange = self._app.control.mailbox.exchange
                producer.publish(
                    {"method": method, "arguments": arguments, "destination": None},
                    exchange=exchange.name,
                    declare=[exchange],
                    serializer="json",
                    retry=False,
                )

    def count_readers(self, queue: str) -> int | None:
        """Return the number of workers that consume a queue; None without remote control.

        A worker that does not answer within a second is not counted.

        Raises:
            QueueUnavailable: The broker does not answer.
        """
        if not self._broker.has_remote_control:
            return None
        with self._broker.driver_errors(self._drop_connections), self._connection() as connection:
            inspect = self._app.control.inspect(timeout=_REPLY_TIMEOUT_S, connection=connection)
            replies: dict[str, list[dict[str, str]]] = inspect.active_queues() or {}
        name = self._broker.prefix + queue
        return sum(any(each["name"] == name for each in queues) for queues in replies.values())

    def close(self) -> None:
        """Close the connections."""
        self._app.close()

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=self._broker.connect_timeout_s)
            yield connection

    def _drop_connections(self) -> None:
        # Kombu keeps one pool per process and broker; a closed pool could not be used again.
        pool = self._app.pool
        pool.resize(pool.limit, force=True, ignore_errors=True, reset=True)


def _with_timeouts(broker: Broker) -> Broker:
    """Return a broker whose connections over AMQP end when RabbitMQ blocks them for long."""
    if broker.kind != "amqp":
        return broker
    options = broker.transport_options | {"read_timeout": broker.network_timeout_s}
    return replace(broker, transport_options=options)
