"""The keys of results that remote agents save in S3, and the messages that announce them on SQS.

The app in the agent's container writes both (`workers/agentcore`), the pipeline reads them. Must
not: import more than the standard library, because an agent's container imports this module.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

#: Source of our own announcements; S3's own notifications say `aws:s3`, and quote their keys.
EVENT_SOURCE = "rollout:collector"
_S3_SOURCE = "aws:s3"

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
#: Lengths of session ids that AgentCore Runtime accepts.
SESSION_CHARS = (33, 256)


class ResultObject(NamedTuple):
    """The place of one result."""

    bucket: str
    key: str


def training_key(exp_id: str, input_id: str, session_id: str) -> str:
    """Return the key of a result that was asked for by `_training` alone."""
    return f"{exp_id}/{input_id}_{session_id}.json"


def rollout_key(exp_id: str, input_id: str, session_id: str) -> str:
    """Return the key of a result that was asked for by `_rollout`."""
    return f"{exp_id}/{input_id}/{session_id}.json"


def announce(result: ResultObject, *, at: datetime) -> str:
    """Return the message that announces a saved result, shaped as an S3 notification."""
    return json.dumps(
        {
            "Records": [
                {
                    "eventSource": EVENT_SOURCE,
                    "eventName": "ObjectCreated:Put",
                    "eventTime": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                    "s3": {"bucket": {"name": result.bucket}, "object": {"key": result.key}},
                }
            ]
        }
    )


def announced_results(body: str) -> list[ResultObject]:
    """Return the objects that a message announces; none where it is S3's test message.

    Raises:
        ValueError: The message announces no object.
    """
    try:
        document: Any = json.loads(body)
        if document.get("Event") == "s3:TestEvent":
            return []
        return [_announced(record) for record in list[Any](document["Records"])]
    except (AttributeError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"it announces no object in S3: {type(error).__name__}") from error


def _announced(record: Any) -> ResultObject:
    key, bucket = record["s3"]["object"]["key"], record["s3"]["bucket"]["name"]
    if not isinstance(key, str) or not isinstance(bucket, str):
        raise ValueError("a record's bucket or key is no text")
    return ResultObject(
        bucket, unquote_plus(key) if record.get("eventSource") == _S3_SOURCE else key
    )
