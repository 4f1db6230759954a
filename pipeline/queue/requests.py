"""Requests to workers: published in batches as Celery tasks, by name.

Used by the dispatcher, after the attempts are committed, and by `rollout rescore`. Must not: touch
the store.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from celery import Celery
from kombu.exceptions import BatchPublishError, OperationalError

from pipeline.contract.messages import TASK_RESCORE, TASK_RUN, RescoreRequest, RolloutRequest
from pipeline.queue.broker import Broker
from pipeline.queue.celery_app import make_celery_app
from pipeline.queue.signing import CANCEL, REQUEST

_ASK_S = 1.0


class RequestPublisher:
    """Publishes requests; the task id is the attempt's label."""

    def __init__(self, broker: Broker, *, expires_s: float) -> None:
        self._broker = broker
        self._app: Celery = make_celery_app(broker)
        self._expires_s = expires_s

    def publish(self, requests: Sequence[RolloutRequest], *, queue: str) -> list[RolloutRequest]:
        """Publish requests to a queue; return those that are too large for this broker.

        Raises:
            QueueUnavailable: The broker does not answer; some may have been published, and
                publishing all of them again does no harm: a worker runs an attempt once.
        """
        named = [(request.label, request) for request in requests]
        left_out = self._send(TASK_RUN, named, queue)
        return [request for request in requests if request.label in left_out]

    def publish_rescores(
        self, requests: Sequence[RescoreRequest], *, queue: str
    ) -> list[RescoreRequest]:
        """Publish requests to score stored trajectories again; return those that are too large.

        Raises:
            QueueUnavailable: The broker does not answer; publish all of them again.
        """
        named = [(f"{request.label}-{request.reward}", request) for request in requests]
        left_out = self._send(TASK_RESCORE, named, queue)
        return [request for task_id, request in named if task_id in left_out]

    def _send(
        self,
        task: str,
        requests: Sequence[tuple[str, RolloutRequest | RescoreRequest]],
        queue: str,
    ) -> set[str]:
        name = self._broker.prefix + queue
        signer = self._broker.signer
        expires = datetime.now(UTC) + timedelta(seconds=self._expires_s)
        left_out: set[str] = set()
        try:
            with self._app.producer_pool.acquire(block=True) as producer, producer.batch():
                for task_id, request in requests:
                    message = request.model_dump_json(exclude_defaults=True)
                    if not self._fits(message):
                        left_out.add(task_id)
                        continue
                    signature = signer.signature(message, REQUEST)
                    self._app.send_task(
                        task,
                        args=(message, signature) if signature else (message,),
                        task_id=task_id,
                        queue=name,
                        producer=producer,
                        expires=expires,
                        retry=False,
                        argsrepr=request.describe(),
                        kwargsrepr="",
                    )
        except (OperationalError, BatchPublishError, OSError) as error:
            self._start_over()
            raise self._broker.unavailable(error) from error
        return left_out

    def _fits(self, message: str) -> bool:
        most = self._broker.most_bytes
        # Quoted once more inside its envelope, a character takes twelve bytes at most.
        if most is None or len(message) * 12 <= most:
            return True
        return len(json.dumps(message)) <= most

    def stop_attempts(self, labels: Sequence[str]) -> None:
        """Tell workers to stop attempts that are no longer theirs; heard by those that can.

        Best effort: a worker that does not hear it is fenced, and ends at its own deadline.
        """
        if not labels or not self._broker.has_remote_control:
            return
        try:
            arguments: dict[str, object] = {"labels": list(labels)}
            if signature := self._broker.signer.signature("\n".join(labels), CANCEL):
                arguments["signature"] = signature
            with self._app.connection_for_write() as connection:
                # The broadcast itself would wait for ever for a broker that is away.
                connection.ensure_connection(max_retries=1, timeout=self._broker.connect_timeout_s)
            self._app.control.broadcast("cancel_attempts", arguments=arguments)
        except (OperationalError, OSError) as error:
            self._start_over()
            raise self._broker.unavailable(error) from error

    def count_readers(self, queue: str) -> int | None:
        """Return how many workers say that they read a queue; None: the broker cannot ask them.

        A worker that does not answer within a second is not counted.

        Raises:
            QueueUnavailable: The broker does not answer.
        """
        if not self._broker.has_remote_control:
            return None
        try:
            with self._app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=self._broker.connect_timeout_s)
                inspect = self._app.control.inspect(timeout=_ASK_S, connection=connection)
                answers: dict[str, list[dict[str, str]]] = inspect.active_queues() or {}
        except (OperationalError, OSError) as error:
            self._start_over()
            raise self._broker.unavailable(error) from error
        name = self._broker.prefix + queue
        return sum(any(each["name"] == name for each in queues) for queues in answers.values())

    def close(self) -> None:
        """Close the connections."""
        self._app.close()

    def _start_over(self) -> None:
        # The pool is kombu's, one per process and broker: closed for good, it would stay so.
        pool = self._app.pool
        pool.resize(pool.limit, force=True, ignore_errors=True, reset=True)
