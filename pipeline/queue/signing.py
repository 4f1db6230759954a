"""Signatures of messages: with a shared key, a message without its signature is rejected.

Used by publishers, consumers, workers, gateways and the payload store. A signature is for one
purpose, so a request cannot be passed off as a completion. Messages are not encrypted. Must not:
decode messages.
"""

from __future__ import annotations

import hashlib
import hmac

from pipeline.contract.errors import MalformedMessage

#: A sealed body is this magic, the signature, and the body itself.
_MAGIC = b"RPS1"
_SIGNATURE_BYTES = hashlib.sha256().digest_size
_HEAD_BYTES = len(_MAGIC) + _SIGNATURE_BYTES

REQUEST = b"request"
COMPLETION = b"completion"
HEARTBEAT = b"heartbeat"
CANCEL = b"cancel"
POLICY = b"policy"
MARKER = b"marker"
GATEWAY_KEY = b"gateway key"
JOURNAL = b"journal"


class Forged(MalformedMessage):
    """A message not signed with this deployment's key: changed, or from another sender."""

    code = "E304"


class Signer:
    """Signs and checks messages; does neither without a key.

    Args:
        key: Shared by all processes of a deployment.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def signature(self, message: bytes | str, purpose: bytes) -> str:
        """Return a signature that travels beside the message; empty without a key."""
        return self._digest(message, purpose).hex() if self._key else ""

    def check(self, message: bytes | str, signature: str, purpose: bytes) -> None:
        """Compare a signature that came beside a message.

        Raises:
            Forged: The signature is missing or wrong.
        """
        if self._key and not hmac.compare_digest(
            self._digest(message, purpose).hex().encode(), signature.encode("utf-8", "replace")
        ):
            raise _forged(purpose, is_signed=bool(signature))

    def seal(self, body: bytes, purpose: bytes) -> bytes:
        """Return the body with its signature in front; without a key, the body unchanged."""
        return _MAGIC + self._digest(body, purpose) + body if self._key else body

    def open(self, data: bytes, purpose: bytes) -> bytes:
        """Return the body of sealed data; without a key the signature is not checked.

        Raises:
            Forged: The signature is missing or wrong.
        """
        body = unsealed(data)
        if self._key is None:
            return body
        signature = data[len(_MAGIC) : _HEAD_BYTES] if body is not data else b""
        if not hmac.compare_digest(self._digest(body, purpose), signature):
            raise _forged(purpose, is_signed=bool(signature))
        return body

    def _digest(self, message: bytes | str, purpose: bytes) -> bytes:
        assert self._key
        data = message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message
        return hmac.digest(self._key, purpose + b"\0" + data, "sha256")


def unsealed(data: bytes) -> bytes:
    """Return the body without its signature; the signature is not checked."""
    return data[_HEAD_BYTES:] if data[: len(_MAGIC)] == _MAGIC else data


def _forged(purpose: bytes, *, is_signed: bool) -> Forged:
    problem = "is signed with another key, or was changed" if is_signed else "is not signed"
    return Forged(
        f"A {purpose.decode()} message {problem}.",
        why="This process accepts only messages signed with its broker.signing_key.",
        remedy="Give all processes of this deployment the same ROLLOUT_BROKER__SIGNING_KEY.",
    )
