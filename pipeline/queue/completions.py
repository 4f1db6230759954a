"""Completions and heartbeats on the broker: sent in batches by workers, read by the collector.

A worker's outbox keeps a completion until `send_completions` returns; the collector acknowledges
after its commit. Frames of journals travel in the queue of completions, and markers of collectors
in both. Must not: decide anything, or use the store.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kombu import Connection, Consumer, Message, Producer, Queue

from pipeline.contract.errors import MalformedMessage, QueueUnavailable
from pipeline.contract.messages import (
    COMPLETION_QUEUE,
    HEARTBEAT_QUEUE,
    Completion,
    Heartbeat,
    JournalFrame,
    Marker,
    parse_message,
)
from pipeline.queue.broker import Broker
from pipeline.queue.driver_errors import is_driver_error, is_refusal_of_size
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.journal_frames import decode_frames, encode_frames
from pipeline.queue.signing import COMPLETION, HEARTBEAT, JOURNAL, MARKER, Forged

_CONTENT_TYPE = "application/x-rollout-completions"
_JOURNAL_TYPE = "application/x-rollout-journal"
_MARKER_TYPE = "application/x-rollout-marker"
#: Messages that travel in the queue of another kind say by their content type what they are.
_PURPOSES: dict[Any, bytes] = {_JOURNAL_TYPE: JOURNAL, _MARKER_TYPE: MARKER}

#: Redis: unacknowledged messages of this consumer are kept apart from those of workers.
_UNACKED_KEY = "rollout.unacked"
_PREFETCH = 64

#: A blocked connection does not answer the request to close it either.
_CLOSE_TIMEOUT_S = 1.0


class _Reconnecting:
    """A connection that is closed when the broker fails, and made again at the next use."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connection: Connection | None = None

    def close(self) -> None:
        """Close the connection; the broker delivers unacknowledged messages again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                limit_closing(connection, _CLOSE_TIMEOUT_S)
                connection.release()
            except Exception as error:
                if not is_driver_error(error):
                    raise


class FrameTooLong(Exception):
    """Completions that do not fit into one message of the broker together."""


class OutcomePublisher(_Reconnecting):
    """A connection over which a worker sends completions and heartbeats."""

    _producer: Producer | None = None

    def send_completions(self, completions: Sequence[Completion]) -> None:
        """Send completions as one message.

        Raises:
            QueueUnavailable: The broker did not take the message; send all completions again.
            FrameTooLong: The broker takes no message as long as this one; send fewer.
        """
        body = self._broker.signer.seal(encode_completions(completions), COMPLETION)
        self._publish_frame(body, _CONTENT_TYPE)

    def send_journal(self, frames: Sequence[JournalFrame]) -> None:
        """Send frames of journals as one message.

        Raises:
            QueueUnavailable: The broker did not take the message; send all frames again.
            FrameTooLong: The broker takes no message as long as this one; send fewer.
        """
        self._publish_frame(self._broker.signer.seal(encode_frames(frames), JOURNAL), _JOURNAL_TYPE)

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat.

        Raises:
            QueueUnavailable: The broker did not take the message.
        """
        self._publish(
            HEARTBEAT_QUEUE,
            self._broker.signer.seal(heartbeat.model_dump_json().encode(), HEARTBEAT),
            content_type="application/json",
            content_encoding="utf-8",
        )

    def send_marker(self, marker: Marker) -> None:
        """Send a marker through its queue.

        Raises:
            QueueUnavailable: The broker did not take the message.
        """
        self._publish(
            marker.queue,
            self._broker.signer.seal(marker.model_dump_json().encode(), MARKER),
            content_type=_MARKER_TYPE,
            content_encoding="binary",
        )

    def close(self) -> None:
        """Close the connection."""
        self._producer = None
        super().close()

    def _publish_frame(self, body: bytes, content_type: str) -> None:
        if self._broker.most_bytes is not None and len(body) > self._broker.most_bytes:
            raise FrameTooLong(f"{len(body)} bytes; {self._broker.most_bytes} fit")
        try:
            self._publish(
                COMPLETION_QUEUE,
                body,
                content_type=content_type,
                content_encoding="binary",
            )
        except QueueUnavailable as error:
            if is_refusal_of_size(error.__cause__):
                raise FrameTooLong(f"{len(body)} bytes: {error.__cause__}") from error
            raise

    def _publish(self, name: str, body: bytes | str, **properties: Any) -> None:
        with self._broker.driver_errors(self.close):
            if self._producer is None:
                self._connection = self._broker.connect(confirm=True)
                self._producer = Producer(self._connection)
            queue = self._broker.queue(name)
            self._producer.publish(
                body,
                routing_key=queue.name,
                exchange="",
                declare=[queue],
                delivery_mode=2,
                retry=False,
                timeout=self._broker.network_timeout_s,
                confirm_timeout=self._broker.network_timeout_s,
                **properties,
            )


@dataclass(slots=True)
class Delivery:
    """Messages that were read together; acknowledge them after their commit."""

    completions: list[Completion] = field(default_factory=list)
    journal: list[JournalFrame] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    markers: list[Marker] = field(default_factory=list)
    malformed: list[tuple[str, str, bytes]] = field(default_factory=list)  #: kind, reason, raw
    messages: list[Message] = field(default_factory=list)

    def ack(self) -> None:
        """Acknowledge all messages.

        After a lost acknowledgement the broker delivers them again, which changes nothing.
        """
        for message in self.messages:
            message.ack()


class OutcomeConsumer(_Reconnecting):
    """Reads completions and heartbeats; connects and reconnects by itself."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self._delivery = Delivery()
        self._channel: Any = None
        self._queues: list[tuple[Queue, Callable[[Message], None]]] = []
        #: Whether the last delivery left messages in the queues.
        self._is_behind = False
        self.hides_s = broker.hides_s

    def receive(self, *, most: int, linger_s: float, timeout_s: float) -> Delivery:
        """Return the messages that arrived; none after `timeout_s` without one.

        Args:
            most: Completions and frames of journals after which no more are gathered.
            linger_s: Wait for more after the first.
            timeout_s: Wait for the first.

        Raises:
            QueueUnavailable: The broker does not answer; it delivers these messages again.
        """
        with self._broker.driver_errors(self.close):
            if self._connection is None:
                self._connect()
            # Messages may also arrive between two calls, while the broker answers other requests.
            if not self._delivery.messages:
                self._drain(timeout_s)
            if self._delivery.messages:
                gather = self._pop if self._broker.kind == "redis" else self._linger
                gather(most, linger_s)
        delivery, self._delivery = self._delivery, Delivery()
        return delivery

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a delivery that is committed.

        Raises:
            QueueUnavailable: The broker does not answer; the second delivery changes nothing.
        """
        with self._broker.driver_errors(self.close):
            delivery.ack()

    def receive_sent(self) -> None:
        """Receive all messages that the broker has already sent; the next `receive` returns them.

        RabbitMQ pushes messages. Its answer to a request on the same channel comes behind all that
        it pushed before. Redis and SQS send a message when they are asked for one, and the next
        `receive` asks.

        Raises:
            QueueUnavailable: The broker does not answer.
        """
        if self._channel is not None and self._broker.kind == "amqp":
            with self._broker.driver_errors(self.close):
                self._broker.queue(HEARTBEAT_QUEUE).bind(self._channel).queue_declare(passive=True)

    def restore_unacknowledged(self) -> None:
        """Put messages of dead collectors back into their queues, where the broker does not.

        Raises:
            QueueUnavailable: The broker does not answer.
        """
        if self._channel is not None and self._broker.kind == "redis":
            with self._broker.driver_errors(self.close):
                restore_unacknowledged(self._channel)

    def close(self) -> None:
        """Close the connection; the broker delivers unacknowledged messages again."""
        self._channel = None
        super().close()

    def _connect(self) -> None:
        self._delivery = Delivery()  # the broker delivers messages of the old connection again
        self._connection = connection = self._broker.connect(
            unacked_key=_UNACKED_KEY, heartbeats=True
        )
        connection.ensure_connection(max_retries=1, timeout=self._broker.connect_timeout_s)
        self._channel = channel = connection.channel()
        self.restore_unacknowledged()
        self._queues = [
            (self._broker.queue(name).bind(self._channel), partial(self._take, purpose))
            for name, purpose in ((COMPLETION_QUEUE, COMPLETION), (HEARTBEAT_QUEUE, HEARTBEAT))
        ]
        for queue, take in self._queues:
            Consumer(channel, [queue], on_message=take, prefetch_count=_PREFETCH).consume()

    def _linger(self, most: int, linger_s: float) -> None:
        until = time.monotonic() + linger_s
        while self._count() < most:
            left = until - time.monotonic()
            if left <= 0 or not self._drain(left):
                break

    def _pop(self, most: int, linger_s: float) -> None:
        """Gather what waits in Redis after a pause, and ask for no more.

        `_drain` would leave a blocking pop behind. Redis answers it while this delivery is being
        committed, and if the collector dies then, the answer is lost.
        """
        if not self._is_behind:
            time.sleep(linger_s)
        # In turn: heartbeats must not wait until all completions of a busy system are taken.
        waiting = deque(self._queues)
        while waiting and self._has_room(most):
            queue, take = waiting.popleft()
            if (message := queue.get()) is not None:
                take(message)
                waiting.append((queue, take))
        self._is_behind = not self._has_room(most)

    def _has_room(self, most: int) -> bool:
        return self._count() < most and len(self._delivery.messages) < _PREFETCH

    def _count(self) -> int:
        return len(self._delivery.completions) + len(self._delivery.journal)

    def _drain(self, timeout_s: float) -> bool:
        assert self._connection is not None
        self._connection.heartbeat_check()
        try:
            self._connection.drain_events(timeout=timeout_s)
            return True
        except TimeoutError as error:
            if error.errno == errno.ETIMEDOUT:
                raise  # the connection timed out, not this wait
            return False

    def _take(self, purpose: bytes, message: Message) -> None:
        """Add a message to the delivery; `purpose` is that of most messages of its queue."""
        self._delivery.messages.append(message)
        purpose = _PURPOSES.get(message.content_type, purpose)
        body = message.body
        raw = body.encode() if isinstance(body, str) else bytes(body or b"")
        try:
            self._decode(purpose, self._broker.signer.open(raw, purpose))
        except Forged as error:
            # Dead letters of this kind cannot be requeued, so no operator lets a forged one in.
            self._delivery.malformed.append(("forged", str(error), raw))
        except MalformedMessage as error:
            self._delivery.malformed.append((purpose.decode(), str(error), raw))

    def _decode(self, purpose: bytes, data: bytes) -> None:
        delivery = self._delivery
        if purpose == COMPLETION:
            good, bad = decode_completions(data)
            delivery.completions += good
            delivery.malformed += [("completion", item.reason, item.raw) for item in bad]
        elif purpose == JOURNAL:
            delivery.journal += decode_frames(data)
        elif purpose == HEARTBEAT:
            delivery.heartbeats.append(parse_message(Heartbeat, data))
        else:
            delivery.markers.append(parse_message(Marker, data))


def limit_closing(connection: Connection, timeout_s: float) -> None:
    """Let a connection over AMQP close after this time, also if the broker does not answer."""
    transport = getattr(connection.connection, "transport", None) if connection.connected else None
    sock = getattr(transport, "sock", None)
    if sock is not None:
        sock.settimeout(timeout_s)


def restore_unacknowledged(channel: Any) -> None:
    """Put back the messages that a dead consumer had read from Redis and not acknowledged.

    Kombu would do so after the visibility timeout. A restarted collector need not wait for it; a
    message that another collector still holds is delivered twice, which changes nothing
    (docs/adr/0005).
    """
    qos = channel.qos
    with channel.conn_or_acquire() as client:
        for tag in client.zrange(qos.unacked_index_key, 0, -1):
            qos.restore_by_tag(tag, client)
