"""Tells the errors of the broker's drivers (kombu, amqp, redis, botocore) from all others.

Used by `Broker.driver_errors`, the one place that turns them into `QueueUnavailable`, and by
publishers, to tell a message that is too long from an unavailable broker. Must not: import the
drivers, because a process loads only the driver of its broker.
"""

from __future__ import annotations

from kombu.exceptions import SerializationError, SerializerNotInstalled

_PRECONDITION_FAILED = 406

_DRIVERS = frozenset({"amqp", "boto3", "botocore", "kombu", "redis"})


def is_driver_error(error: BaseException) -> bool:
    """Say whether a driver raised the error because the broker failed or refused.

    Kombu's own lists (`connection_errors`, `channel_errors`) are not complete: a botocore
    `ClientError` and AMQP's `MessageNacked` are in neither.
    """
    if isinstance(error, OSError):
        return True
    if isinstance(error, (SerializationError, SerializerNotInstalled)):
        return False
    if isinstance(error, AttributeError):
        # kombu 5.7 raises this when Redis goes away, because its poller has lost the channel.
        return _raised_in_driver(error)
    return any(_is_of_driver(base.__module__) for base in type(error).__mro__)


def is_refusal_of_size(error: BaseException | None) -> bool:
    """Say whether the broker refused a message because it is too long."""
    # RabbitMQ: PRECONDITION_FAILED. SQS: a code that several faults share, so the text decides.
    text = str(error).lower()
    if getattr(error, "code", None) == _PRECONDITION_FAILED:
        return "message size" in text
    answer: dict[str, dict[str, str]] = getattr(error, "response", {})
    code = answer.get("Error", {}).get("Code", "")
    return "BatchRequestTooLong" in code or (
        "InvalidParameterValue" in code and "must be shorter than" in text
    )


def _raised_in_driver(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_of_driver(trace.tb_frame.f_globals.get("__name__", ""))


def _is_of_driver(module: str) -> bool:
    return module.partition(".")[0] in _DRIVERS
