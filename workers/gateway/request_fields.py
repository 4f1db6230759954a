"""Reads the fields of a request, and says in plain words which field is wrong.

Every dialect uses it. Must not: know a dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.gateway.rejections import Rejection, bad_request

#: OpenAI's fields about an account or its storage: the model's server has neither.
ACCOUNT_FIELDS = frozenset(
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
        Rejection: It names none.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("The field `model` must be the name of the model.")
    return model


def read_list(body: Mapping[str, Any], name: str, *, is_required: bool = False) -> list[Any]:
    """Return a list of objects; empty if the field is missing.

    Raises:
        Rejection: It is no list of objects, or it is required and empty.
    """
    value = body.get(name)
    if value is None and not is_required:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise bad_request(f"The field `{name}` must be a list of objects.")
    if is_required and not value:
        raise bad_request(f"The field `{name}` must not be empty.")
    return value


def require_one_choice(body: Mapping[str, Any]) -> None:
    """Reject a request for several answers: each recorded call has one."""
    if body.get("n") not in (None, 1):
        raise bad_request("The field `n` must be 1: each call gives one answer. Send more calls.")


def unsupported(what: str) -> Rejection:
    """Return the rejection of a feature that the model's server does not have."""
    return bad_request(f"{what} is not supported by this gateway.")
