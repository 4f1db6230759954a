"""Gateway keys: the signed API keys with which one attempt calls its model through a gateway.

Workers write a key for each attempt that needs one; every gateway reads it without state. A key
names the attempt and its model, and no credentials of the model's endpoint. Must not: be used for
anything but model calls.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

from pydantic import Field

from pipeline.contract.errors import MalformedMessage, PipelineError
from pipeline.contract.messages import AttemptRef, RolloutRequest
from pipeline.contract.run import TokenWish
from pipeline.queue.signing import GATEWAY_KEY, Signer

#: Starts every key, so that leaked keys can be found by a search.
PREFIX = "rpk-"


class BadKey(PipelineError):
    """A key that this gateway does not accept: missing, forged, damaged or expired."""

    code = "E306"


class GatewayKey(AttemptRef):
    """The content of a key: the attempt, and how its model is called.

    `expires_at` is in Unix seconds. `base_url` names the endpoints as the run does; None: those of
    the gateway. `sampling` overrides what the agent asks for.
    """

    run: str
    expires_at: int
    model: str
    base_url: str | tuple[str, ...] | None = None
    weight: float = 1.0
    sampling: dict[str, Any] = Field(default_factory=dict)
    tokens: TokenWish = "off"


def gateway_key_of(request: RolloutRequest, model: str, *, expires_at: int = 0) -> GatewayKey:
    """Return the content of the key of a request's attempt.

    Args:
        request: The attempt.
        model: The model's name.
        expires_at: In Unix seconds; a worker's own gateway sets it.
    """
    return GatewayKey(
        **request.identity,
        run=request.run,
        expires_at=expires_at,
        model=model,
        base_url=request.base_url,
        weight=request.weight,
        sampling=request.own_sampling,
        tokens=request.tokens,
    )


class GatewayKeys:
    """Writes and reads keys.

    Args:
        secret: Shared by all gateways that accept each other's keys.
        clock: Unix seconds.
    """

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._signer = Signer(secret)
        self._clock = clock

    def write(self, key: GatewayKey) -> str:
        """Return a key as text of letters, digits, `-`, `_` and one dot."""
        body = key.model_dump_json(exclude_defaults=True)
        return f"{PREFIX}{_encoded(body.encode())}.{self._signer.signature(body, GATEWAY_KEY)}"

    def read(self, text: str) -> GatewayKey:
        """Return the content of a key.

        Raises:
            BadKey: It is missing, damaged, signed with another secret, or expired.
        """
        if not text:
            raise BadKey("The request has no key.", remedy="Send the endpoint's `api_key`.")
        encoded, _, signature = text.removeprefix(PREFIX).partition(".")
        try:
            body = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            self._signer.check(body, signature, GATEWAY_KEY)
            key = GatewayKey.model_validate_json(body)
        except (MalformedMessage, ValueError):
            raise BadKey(
                "The key is not one of this gateway.",
                why="It is damaged, or was signed with another key.",
                remedy="Use the endpoint's `api_key`; give all processes of a deployment the "
                "same ROLLOUT_BROKER__SIGNING_KEY.",
            ) from None
        if key.expires_at < self._clock():
            raise BadKey(f"The key of {key.label} has expired.")
        return key


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
