"""The destination of a rollout's result, as the payload of an invocation names it.

`app.py` calls it before it answers. `_training` names an SQS queue and requires rewards; `_rollout`
may name a model endpoint. Must not: know HTTP or AWS.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.contract.result_keys import ResultObject, rollout_key, training_key

_TRAINING_FIELDS = ("exp_id", "session_id", "input_id", "sqs_url", "s3_bucket")
_ROLLOUT_FIELDS = ("exp_id", "input_id", "s3_bucket")
#: Fields that become parts of keys.
_IDS = frozenset({"exp_id", "input_id", "session_id"})


class BadDestination(ValueError):
    """A field of `_rollout` is missing or bad; the text names it."""


class BadTrainingDestination(BadDestination):
    """A field of `_training` is missing or bad; the text names it."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The place of a result, and the fields that the result must have."""

    result: ResultObject
    identity: tuple[str, str, str]  #: experiment, input, session
    sqs_url: str | None = None
    is_training: bool = False  #: rewards are checked
    needs_rewards: bool = True  #: False: a reward of the run's own scores the result
    needs_turns: bool = False  #: `_training` alone: `rollout_data` must be there
    rollout: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def input_id(self) -> str:
        """The id of the input."""
        return self.identity[1]


def destination_of(payload: Any, header_session: str | None) -> Destination | None:
    """Return the destination of a payload's result; None: the result is not saved.

    Args:
        payload: The decoded body of the invocation.
        header_session: The session of the invocation's header.

    Raises:
        BadDestination: A field is missing or bad.
    """
    if not isinstance(payload, Mapping):
        return None
    try:
        training = _section(payload, "_training")
        if training:
            _check(training, "_training", _TRAINING_FIELDS)
    except BadDestination as error:
        raise BadTrainingDestination(str(error)) from error
    rollout = _section(payload, "_rollout")
    if rollout and any(name in rollout for name in _ROLLOUT_FIELDS):
        _check(rollout, "_rollout", _ROLLOUT_FIELDS)
        return _of_rollout(rollout, training, header_session)
    if not training:
        return None
    identity = training["exp_id"], training["input_id"], training["session_id"]
    return Destination(
        ResultObject(training["s3_bucket"], training_key(*identity)),
        identity,
        sqs_url=training["sqs_url"],
        is_training=True,
        needs_rewards=_needs_rewards(training),
        needs_turns=True,
        rollout=rollout or None,
    )


def _of_rollout(
    rollout: Mapping[str, Any], training: Mapping[str, Any], header_session: str | None
) -> Destination:
    session = header_session or training.get("session_id") or str(uuid.uuid4())
    _check_text(session, "session_id", "the session of the invocation")
    identity = rollout["exp_id"], rollout["input_id"], session
    return Destination(
        ResultObject(rollout["s3_bucket"], rollout_key(*identity)),
        identity,
        sqs_url=training.get("sqs_url"),
        is_training=bool(training),
        needs_rewards=_needs_rewards(training),
        rollout=rollout,
    )


def _needs_rewards(training: Mapping[str, Any]) -> bool:
    return training.get("rewards") != "optional"


def _section(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = payload.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise BadDestination(f"{name} must be an object, not {type(section).__name__}")
    return section


def _check(section: Mapping[str, Any], name: str, fields: tuple[str, ...]) -> None:
    for each in fields:
        if each not in section:
            kind = name.removeprefix("_")
            raise BadDestination(f"Missing required {kind} config field: {each!r}")
        _check_text(section[each], each, f"{name}.{each}")


def _check_text(value: Any, field_name: str, place: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise BadDestination(f"{place} must be non-empty text, not {value!r}")
    if field_name in _IDS and "/" in value:
        raise BadDestination(f"{place} must not hold a '/', because it becomes part of a key")
