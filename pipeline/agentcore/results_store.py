"""S3 and SQS as the results service uses them: read, list, receive, delete.

Clients are boto3's; every failure of a service becomes `ServiceUnavailable`. Must not: know the
trajectory store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.contract.errors import ServiceUnavailable
from pipeline.contract.result_keys import ResultObject
from pipeline.settings import Settings

E_RESULTS = "E209"

#: Larger results are not read: they would exhaust the memory of the controller.
MAX_RESULT_BYTES = 256 * 1024 * 1024

_WAIT_S = 1
_MOST_MESSAGES = 10
_MISSING = frozenset({"NoSuchKey", "404"})


class ResultTooLarge(Exception):
    """A result has more bytes than are read."""


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message of the results queue."""

    queue_url: str
    body: str
    receipt: str
    receives: int  #: how often it was received


class ResultsStore:
    """The buckets and queues of results.

    Args:
        settings: Region and endpoints of S3 and SQS.
    """

    def __init__(self, settings: Settings) -> None:
        import boto3
        from botocore.config import Config

        aws = settings.aws
        config = Config(
            connect_timeout=settings.payloads.connect_timeout_s,
            read_timeout=settings.payloads.network_timeout_s,
            retries={"total_max_attempts": 3},
            max_pool_connections=32,
        )
        self._s3: Any = boto3.client(
            "s3", region_name=aws.region, endpoint_url=aws.s3_endpoint, config=config
        )
        self._sqs: Any = boto3.client(
            "sqs", region_name=aws.region, endpoint_url=aws.sqs_endpoint, config=config
        )

    def get(self, result: ResultObject) -> bytes | None:
        """Return the bytes of a result; None: there is no such object.

        Raises:
            ResultTooLarge: It is larger than is read.
            ServiceUnavailable: S3 does not answer.
        """
        with _errors(f"s3://{result.bucket}"):
            try:
                found = self._s3.get_object(Bucket=result.bucket, Key=result.key)
            except self._s3.exceptions.ClientError as error:
                if error.response["Error"]["Code"] in _MISSING:
                    return None
                raise
            if found["ContentLength"] > MAX_RESULT_BYTES:
                found["Body"].close()
                raise ResultTooLarge(f"{found['ContentLength']} bytes")
            return found["Body"].read()

    def list(self, bucket: str, *, prefix: str, first: str, last: str) -> Iterator[str]:
        """Yield the keys of a folder between two keys, in order.

        Raises:
            ServiceUnavailable: S3 does not answer.
        """
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix, StartAfter=first
        )
        with _errors(f"s3://{bucket}"):
            for page in pages:
                for item in page.get("Contents", ()):
                    if item["Key"] > last:
                        return
                    yield item["Key"]

    def receive(self, queue_url: str) -> list[QueuedMessage]:
        """Return messages, or none after a second.

        Raises:
            ServiceUnavailable: SQS does not answer.
        """
        with _errors(queue_url):
            reply = self._sqs.receive_message(
                QueueUrl=queue_url,
                MaxNumberOfMessages=_MOST_MESSAGES,
                WaitTimeSeconds=_WAIT_S,
                AttributeNames=["ApproximateReceiveCount"],
            )
        return [
            QueuedMessage(
                queue_url,
                message["Body"],
                message["ReceiptHandle"],
                int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
            )
            for message in reply.get("Messages", ())
        ]

    def delete(self, messages: Sequence[QueuedMessage]) -> None:
        """Delete received messages.

        Raises:
            ServiceUnavailable: SQS does not answer; the messages come again.
        """
        by_queue: dict[str, list[QueuedMessage]] = {}
        for message in messages:
            by_queue.setdefault(message.queue_url, []).append(message)
        for queue_url, own in by_queue.items():
            for start in range(0, len(own), _MOST_MESSAGES):
                entries = [
                    {"Id": str(number), "ReceiptHandle": message.receipt}
                    for number, message in enumerate(own[start : start + _MOST_MESSAGES])
                ]
                with _errors(queue_url):
                    self._sqs.delete_message_batch(QueueUrl=queue_url, Entries=entries)


@contextmanager
def _errors(place: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (BotoCoreError, ClientError, HTTPError, OSError) as error:
        raise ServiceUnavailable(
            f"The results at {place} cannot be read.",
            why=f"{error}.",
            remedy="Check agentcore.results_bucket, agentcore.results_queue_url and the "
            "permissions of the controller.",
            code=E_RESULTS,
        ) from error
