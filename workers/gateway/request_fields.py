"""Reads the fields of a request; errors name the field that is wrong.

Every dialect uses this module. Must not: know a dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.gateway.rejections import Rejection, bad_request

#: OpenAI's fields about an account or its storage: the model's server has neither.
_ACCOUNT_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


def read_model(body: Mapping[str, Any]) -> str:
    """Return the model that a request names.

    Raises:
        Rejection: The request names no model.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("The field `model` must be the name of the model.")
    return model


def read_list(body: Mapping[str, Any], name: str, *, is_required: bool = False) -> list[Any]:
    """Return a list of objects; empty if the field is missing.

    Raises:
        Rejection: The field is no list of objects, or is required and empty.
    """
    value = body.get(name)
    if value is None and not is_required:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise bad_request(f"The field `{name}` must be a list of objects.")
    if is_required and not value:
        raise bad_request(f"The field `{name}` must not be empty.")
    return value


def read_options(body: Mapping[str, Any], own_fields: frozenset[str]) -> dict[str, Any]:
    """Return the fields that the model's server gets as they are: all but the dialect's own."""
    left_out = _ACCOUNT_FIELDS | own_fields
    return {
        name: value for name, value in body.items() if name not in left_out and value is not None
    }


def require_one_choice(body: Mapping[str, Any]) -> None:
    """Reject a request for several answers: each recorded call has one."""
    if body.get("n") not in (None, 1):
        raise bad_request("The field `n` must be 1: each call gives one answer. Send more calls.")


def unsupported(feature: str) -> Rejection:
    """Return the rejection of a feature that the model's server does not have."""
    return bad_request(f"{feature} is not supported by this gateway.")
