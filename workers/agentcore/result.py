"""The result object of a rollout: the checked return value of an entrypoint, or its error.

`app.py` builds one per invocation and publishes it. The result is always valid JSON. Must not: know
S3, SQS or HTTP.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.redaction import Redactor
from workers.agentcore.destination import Destination

_REDACTED = "***"


class ResultShapeError(ValueError):
    """The return value of an entrypoint is no rollout; the text names the problem."""


def success_bytes(returned: Any, destination: Destination, payload: Mapping[str, Any]) -> bytes:
    """Return the stored form of a good result.

    Raises:
        ResultShapeError: The entrypoint returned no dict, no or bad rewards, no turns, or a value
            that JSON does not have.
    """
    if not isinstance(returned, dict):
        raise ResultShapeError(
            f"the entrypoint must return a dict, and it returned {type(returned).__name__}"
        )
    if destination.is_training:
        _check_rewards(returned, destination)
    stored = {"status_code": 200, "stop_reason": "end_turn"} | returned
    return _encode(stored | _shared_fields(destination, payload))


def error_bytes(
    error: BaseException,
    destination: Destination,
    payload: Mapping[str, Any],
    *,
    partial: Any = None,
) -> bytes:
    """Return the stored form of an error.

    Args:
        error: The error that ended the rollout.
        destination: The place of the result.
        payload: The payload of the invocation.
        partial: The return value of the entrypoint, if the error is about that value.
    """
    # Errors may quote requests and environments, so they are redacted. Good results are not.
    redact = Redactor.of_environment(os.environ, _keys_in(payload)).data
    stored: dict[str, Any] = {
        "status_code": 500,
        "stop_reason": _text_of(error),
        "traceback": "".join(traceback.format_exception(error)),
        "error_class": "contract" if isinstance(error, ResultShapeError) else "agent_bug",
    }
    turns = partial.get("rollout_data") if isinstance(partial, dict) else None
    if turns is None:
        turns = getattr(error, "rollout_data", None)
    shared = _shared_fields(destination, payload)
    if turns is not None:
        try:
            return redact(_encode(stored | {"rollout_data": turns} | shared))
        except ResultShapeError:
            stored["rollout_data_lost"] = "it could not be written as JSON"
    return redact(_encode(stored | shared))


def _shared_fields(destination: Destination, payload: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"input_id": destination.input_id}
    if destination.rollout is not None and not destination.needs_turns:
        bucket, key = destination.result
        fields |= {"s3_bucket": bucket, "result_key": key, "payload": _redacted(payload)}
    return fields


def _redacted(value: Any) -> Any:
    """Return a payload without its API keys, wherever in it they are."""
    if isinstance(value, Mapping):
        return {
            name: _REDACTED if name == "api_key" and each else _redacted(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_redacted(each) for each in value]
    return value


def _keys_in(value: Any) -> Iterator[str]:
    """Yield the API keys of a payload, wherever in it they are."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name == "api_key" and isinstance(each, str):
                yield each
            yield from _keys_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _keys_in(each)


def _encode(document: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultShapeError(f"the result cannot be written as JSON: {error}") from error
    return text.encode()


def _check_rewards(returned: Mapping[str, Any], destination: Destination) -> None:
    turns = returned.get("rollout_data")
    if turns is None and not destination.needs_turns:
        n_turns = None
    elif isinstance(turns, list) and turns:
        n_turns = len(turns)
    else:
        raise ResultShapeError("`rollout_data` must be a non-empty list, one item per turn")
    if "rewards" not in returned and not destination.needs_rewards:
        return
    if "rewards" not in returned:
        raise ResultShapeError("the result has no `rewards`")
    rewards = returned["rewards"]
    if not isinstance(rewards, list):
        _check_number(rewards, "`rewards`")
        return
    if not rewards or (len(rewards) != 1 and n_turns is not None and len(rewards) != n_turns):
        raise ResultShapeError(
            f"`rewards` has {len(rewards)} values; it takes a number, a list of one, or one value "
            f"for each of the {n_turns or 0} turns"
        )
    for position, reward in enumerate(rewards):
        _check_number(reward, f"`rewards[{position}]`")


def _check_number(value: Any, place: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A huge integer is no float, and JSON readers would call it infinite.
    if not is_number or not -1e308 < value < 1e308 or not math.isfinite(value):
        raise ResultShapeError(f"{place} must be a finite number, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _text_of(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    # The error's `__str__` is foreign code too.
    except Exception as failure:
        return f"{type(error).__name__} (its text cannot be shown: {type(failure).__name__})"
