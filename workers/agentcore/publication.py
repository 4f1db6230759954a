"""The publication of a result: the object in S3, then its announcement on SQS, with retries.

`app.py` calls it in a thread. A good result is never replaced: not by a late error, and not by a
second execution of the same session. Must not: decide the content of a result.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from botocore.client import BaseClient
from botocore.exceptions import ClientError

from pipeline.contract.result_keys import ResultObject, announce

#: Tries of each call; the waits double from the first one, six seconds in all.
_TRIES, _FIRST_WAIT_S = 6, 0.2

_EXISTS = frozenset({"PreconditionFailed", "412"})
_RACED = frozenset({"ConditionalRequestConflict", "409"})
_NO_CONDITIONS = frozenset({"NotImplemented", "501"})

log = logging.getLogger(__name__)

T = TypeVar("T")


def save(s3: Any, result: ResultObject, body: bytes, *, is_good: bool) -> None:
    """Put a result, unless a good one is already there.

    Raises:
        Exception: S3 refused the object every time.
    """
    _retry("put", lambda: _put_unless_good(s3, result, body, is_good=is_good))


def send(sqs: Any, queue_url: str, result: ResultObject) -> None:
    """Announce a saved result.

    Raises:
        Exception: SQS refused the message every time.
    """
    message = announce(result, at=datetime.now(UTC))
    _retry("send", lambda: sqs.send_message(QueueUrl=queue_url, MessageBody=message))


def _put_unless_good(s3: Any, result: ResultObject, body: bytes, *, is_good: bool) -> None:
    if not isinstance(s3, BaseClient):
        # A stand-in gets the documented arguments.
        _put(s3, result, body)
        return
    try:
        _put(s3, result, body, IfNoneMatch="*")
    except ClientError as error:
        if _code(error) not in _EXISTS | _NO_CONDITIONS:
            raise
        found = _find(s3, result)
        if found is not None and (not is_good or _is_good(found["Body"].read())):
            log.info("%s is already there and stays.", result.key)
        elif _code(error) in _NO_CONDITIONS:
            _put(s3, result, body)
        elif found is not None:
            # An error gives way to a good result, unless a good one came in the meantime.
            _put(s3, result, body, IfMatch=found["ETag"])


def _put(s3: Any, result: ResultObject, body: bytes, **condition: str) -> None:
    s3.put_object(
        Bucket=result.bucket,
        Key=result.key,
        Body=body,
        ContentType="application/json",
        **condition,
    )


def _find(s3: Any, result: ResultObject) -> dict[str, Any] | None:
    try:
        return s3.get_object(Bucket=result.bucket, Key=result.key)
    except ClientError as error:
        if _code(error) in ("NoSuchKey", "404"):
            return None
        raise


def _is_good(body: bytes) -> bool:
    try:
        return json.loads(body).get("status_code") == 200
    except (ValueError, AttributeError):
        return False


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code"))


def _retry(action: str, call: Callable[[], T]) -> T:
    for number in range(1, _TRIES):
        try:
            return call()
        # Broad on purpose: a result must not be lost by one failure, of whatever type.
        except Exception as error:
            is_raced = isinstance(error, ClientError) and _code(error) in _EXISTS | _RACED
            wait_s = 0.0 if is_raced else _FIRST_WAIT_S * 2 ** (number - 1)
            log.warning(
                "The %s failed %d times, next try in %.1f s: %s", action, number, wait_s, error
            )
            time.sleep(wait_s)
    return call()
