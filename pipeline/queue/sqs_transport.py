"""Kombu's transport for SQS, with batches of messages, free places and expiry.

`broker.py` names it for every connection to SQS. Messages are published ten per call, several calls
at once. A worker receives no more than it has free places, and nothing that is older than the
message allows, by the clock of SQS. Must not: know messages of the pipeline.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, ClassVar

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader
from botocore.session import Session
from kombu.asynchronous.aws.sqs.message import AsyncMessage
from kombu.exceptions import BatchPublishError
from kombu.transport import SQS
from kombu.utils.json import dumps
from vine import promise

log = logging.getLogger(__name__)

#: A message attribute: seconds after its publication in which a worker may receive the message.
EXPIRES_S = "expires_s"

#: A header: how often a message was delivered before.
DELIVERY_COUNT = "x-delivery-count"

#: Attributes that SQS adds to a message: two times in milliseconds, and the count of deliveries.
_SENT, _FIRST_RECEIVED = "SentTimestamp", "ApproximateFirstReceiveTimestamp"
_RECEIVED_COUNT = "ApproximateReceiveCount"

#: The limits of SQS for one call.
_MOST_ENTRIES = 10
_MOST_BYTES = 2**20
#: Part of a call that is kept free for names and attributes.
_SPARE_BYTES = 4 * 2**10
#: Calls at once; botocore keeps ten connections.
_CALLS = 8

Entry = dict[str, Any]


def expiring(after_s: float) -> dict[str, Any]:
    """Return the message attributes of a message that expires; SQS itself has no such option."""
    return {EXPIRES_S: {"DataType": "Number", "StringValue": f"{after_s:g}"}}


class PublishBatch:
    """The messages of a kombu publish batch, sent when the batch ends.

    Args:
        channel: The channel that opens the batch.
        max_size: Messages after which the batch is sent without waiting for its end.
    """

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._entries: dict[str, list[Entry]] = defaultdict(list)

    def publish(self, message: Any, **options: Any) -> None:
        """Add a prepared message; `Channel._put` calls `add`."""
        self.channel.basic_publish(message, _publish_batch=self, **options)
        if sum(map(len, self._entries.values())) >= self._max_size:
            self.flush()

    def add(self, url: str, entry: Entry) -> None:
        """Add the message that is being published."""
        self._entries[url].append(entry)

    def flush(self) -> None:
        """Send the messages.

        Raises:
            BatchPublishError: SQS did not take some of them; others may have been sent.
            ClientError, BotoCoreError: SQS refused a call, or does not answer.
        """
        calls = [
            (url, chunk) for url, entries in self._entries.items() for chunk in _chunks(entries)
        ]
        self.discard()
        if len(calls) == 1:
            self._send(*calls[0])
        elif calls:
            with ThreadPoolExecutor(min(_CALLS, len(calls)), "sqs-publish") as pool:
                for _ in pool.map(self._send, *zip(*calls, strict=True)):
                    pass

    def discard(self) -> None:
        """Forget the messages that were not sent."""
        self._entries.clear()

    close = discard

    def _send(self, url: str, entries: Sequence[Entry]) -> None:
        named = [{"Id": str(number), **entry} for number, entry in enumerate(entries)]
        answer = self.channel.sqs().send_message_batch(QueueUrl=url, Entries=named)
        if failed := answer.get("Failed"):
            raise BatchPublishError(
                f"SQS did not take {len(failed)} of {len(named)} messages: "
                f"{failed[0].get('Code')} {failed[0].get('Message', '')}"
            )


class Channel(SQS.Channel):
    """A channel to SQS."""

    #: Returns how many more messages the consumer can start now; None: the prefetch count decides.
    #: A message that waited in a full worker would be delivered to another one as well, after the
    #: visibility timeout.
    free_places: Callable[[], int] | None = None
    hub: Any  #: the event loop of a Celery worker, None elsewhere
    supports_batch_publish = True
    #: Attributes that SQS returns with each message.
    fetch_message_attributes: ClassVar[Any] = {
        "MessageSystemAttributeNames": [_SENT, _FIRST_RECEIVED],
        "MessageAttributeNames": [EXPIRES_S],
    }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Messages that each unanswered poll may bring.
        self._asked: dict[str, int] = {}
        #: Receipt handles of messages to delete, by the URL of their queue.
        self._acknowledged: dict[str, list[str]] = defaultdict(list)

    def new_sqs_client(
        self,
        region: str,
        access_key_id: str | None,
        secret_access_key: str | None,
        session_token: str | None = None,
    ) -> Any:
        """Return a client of a new session, because credentials may have changed since the last."""
        session = Session()
        session.register_component("data_loader", sqs_descriptions())
        return session.create_client(
            "sqs",
            region_name=region,
            aws_access_key_id=access_key_id,
            aws_secret_access_key=secret_access_key,
            aws_session_token=session_token,
            use_ssl=self.is_secure is not False,
            endpoint_url=self.endpoint_url,
            config=Config(**(self.transport_options.get("client-config") or {})),
        )

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return a batch; kombu's `Producer.batch` calls this."""
        return PublishBatch(self, max_size)

    def count_unfinished(self, queue: str) -> int:
        """Return the estimated number of messages that exist, received ones included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = self.sqs().get_queue_attributes(
            QueueUrl=self._new_queue(queue), AttributeNames=names
        )
        return sum(int(answer["Attributes"][name]) for name in names)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message; in a worker, together with the others of this turn of its loop.

        One call for each would take most of the time of a loop that starts many requests.
        """
        try:
            facts = self.qos.get(delivery_tag).delivery_info
        except KeyError:
            facts = {}
        if self.hub is None or "sqs_message" not in facts:
            super().basic_ack(delivery_tag, multiple)
            return
        if not self._acknowledged:
            self.hub.call_soon(self.flush_acknowledgements)
        self._acknowledged[facts["sqs_queue"]].append(facts["sqs_message"]["ReceiptHandle"])
        self.qos.ack(delivery_tag)

    def flush_acknowledgements(self) -> None:
        """Delete the acknowledged messages; one that is not deleted is delivered again."""
        acknowledged, self._acknowledged = self._acknowledged, defaultdict(list)
        for url, handles in acknowledged.items():
            for first in range(0, len(handles), _MOST_ENTRIES):
                self._delete_messages(url, handles[first : first + _MOST_ENTRIES])

    def _delete_messages(self, url: str, handles: Sequence[str]) -> None:
        entries = [
            {"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles)
        ]
        try:
            answer = self.sqs().delete_message_batch(QueueUrl=url, Entries=entries)
        except (BotoCoreError, ClientError) as error:
            log.warning("%d messages may be delivered again: %s", len(entries), error)
            return
        if failed := answer.get("Failed"):
            log.warning("%d messages may be delivered again: %s", len(failed), failed[0])

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        batch: PublishBatch | None = options.pop("_publish_batch", None)
        if batch is None:
            super()._put(queue, message, **options)
            return
        attributes = message["properties"].pop("message_attributes", None)
        entry = {"MessageBody": AsyncMessage().encode(dumps(message))}
        batch.add(
            self._new_queue(queue),
            entry if attributes is None else entry | {"MessageAttributes": attributes},
        )

    def _message_to_python(self, message: dict[str, Any], queue_name: str, q_url: str) -> Any:
        """Return a message with the header in which quorum queues give the same count."""
        payload = super()._message_to_python(message, queue_name, q_url)
        if earlier := int(message.get("Attributes", {}).get(_RECEIVED_COUNT, 1)) - 1:
            payload.setdefault("headers", {})[DELIVERY_COUNT] = earlier
        return payload

    def _schedule_queue(self, queue: str) -> None:
        """Poll a queue once, unless there is no place for a message; then schedule the next poll.

        This replaces kombu's polling. There, the queues of a channel are polled at the same time
        for the same places, and an error ends the polling of a queue for ever.
        """
        if queue not in self._active_queues:
            return
        most = self._most_wanted()
        if not most:
            self._poll_later(queue)
            return
        self._asked[queue] = most
        name, url = self.canonical_queue_name(queue), self._new_queue(queue)
        self._get_from_sqs(
            name,
            url,
            self.asynsqs(queue=name),
            count=most,
            callback=promise(self._on_answer, (queue, url), on_error=self._on_poll_error),
        )

    def _most_wanted(self) -> int:
        if not self.qos.can_consume():
            return 0
        most = self._get_message_estimate()
        if self.free_places is not None:
            most = min(most, self.free_places() - sum(self._asked.values()))
        return max(most, 0)

    def _on_answer(self, queue: str, url: str, answer: Any) -> None:
        self._asked.pop(queue, None)
        # Kombu turns a server error and a timeout into an empty list.
        if answer and self._on_messages_ready(url, queue, self._without_expired(url, answer)):
            self.hub.call_soon(self._schedule_queue, queue)
        else:
            self._poll_later(queue)

    def _without_expired(self, url: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Delete the messages that have expired; return the answer with the others."""
        messages: list[dict[str, Any]] = answer.get("Messages") or []
        expired = [message for message in messages if self._is_expired(message, url)]
        if not expired:
            return answer
        log.info("%d requests waited too long and were dropped.", len(expired))
        self._delete_messages(url, [message["ReceiptHandle"] for message in expired])
        return answer | {"Messages": [each for each in messages if each not in expired]}

    def _is_expired(self, message: dict[str, Any], url: str) -> bool:
        """Say whether a message is too old; both times are of the clock of SQS."""
        limit = message.get("MessageAttributes", {}).get(EXPIRES_S)
        if limit is None:
            return False
        facts = message["Attributes"]
        is_first = facts[_RECEIVED_COUNT] == "1"
        received_s = int(facts[_FIRST_RECEIVED]) / 1000 if is_first else self._clock_s(url)
        return received_s - int(facts[_SENT]) / 1000 > float(limit["StringValue"])

    def _clock_s(self, url: str) -> float:
        """Ask SQS for its time, in whole seconds; needed for a message that comes again."""
        answer = self.sqs().get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        return parsedate_to_datetime(date).timestamp()

    def _on_poll_error(self, queue: str, url: str, error: BaseException) -> None:
        self._asked.pop(queue, None)
        log.warning("Queue %s could not be polled: %s", queue, error)
        self._poll_later(queue)

    def _poll_later(self, queue: str) -> None:
        self.hub.call_later(self.connection.polling_interval, self._schedule_queue, queue)


class Transport(SQS.Transport):
    """The transport of kombu, with this channel."""

    Channel = Channel


@cache
def sqs_descriptions() -> Loader:
    """Return the descriptions of AWS; a session that read its own would take 50 ms, not 8."""
    return create_loader()


def _chunks(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Divide messages into calls that SQS takes."""
    chunk: list[Entry] = []
    size = 0
    for entry in entries:
        length = len(entry["MessageBody"])
        if chunk and (len(chunk) == _MOST_ENTRIES or size + length > _MOST_BYTES - _SPARE_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += length
    if chunk:
        yield chunk
