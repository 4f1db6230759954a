"""Claim checks: bodies in the payload store, and the references that travel instead of them.

Workers write bodies; trainers, the reconciler and the command line read them. The key of an object
holds the body's digest, so a second execution of an attempt replaces nothing that an accepted
completion refers to. Must not: know the trajectory store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any
from uuid import UUID

from pipeline.contract.errors import MalformedMessage, UnreadableBody
from pipeline.contract.messages import Completion
from pipeline.contract.trajectory import digest_of
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.payloads import PayloadStore

log = logging.getLogger(__name__)

E_BODY_GONE = "E206"
E_BODY_DAMAGED = "E207"

#: Trajectories up to this size travel inside requests, where the broker takes large messages.
INLINE_BYTES = 96 * 1024

#: End of the keys of token bodies.
_TOKENS = ".tokens"


def payload_prefix(run_id: UUID, label: str) -> str:
    """Return the beginning of the keys of an attempt's objects, one for each execution.

    A run's id is the folder of all its objects, for `delete_all`. The 256 folders below it keep
    each of them small enough to be listed.
    """
    folder = blake2b(label.encode(), digest_size=1).hexdigest()
    return f"{run_id}/{folder}/{label}."


def check_out(completion: Completion, store: PayloadStore) -> Completion:
    """Put both bodies into the store; return the completion with their URIs instead.

    The token body has an object of its own, so that a trainer reads nothing else. It is written
    first: the other object holds the completion, from which a lost message is recovered.
    """
    digest = digest_of(completion.body)
    prefix = payload_prefix(completion.run_id, completion.label)
    key = f"{prefix}{digest}.frame"
    fields: dict[str, Any] = {
        "body_uri": store.uri(key),
        "body_bytes": len(completion.body),
        "body_digest": digest,
    }
    if completion.tokens:
        tokens_digest = digest_of(completion.tokens)
        fields |= {
            "tokens": b"",
            "tokens_uri": store.put(f"{prefix}{tokens_digest}{_TOKENS}", completion.tokens),
            "tokens_bytes": len(completion.tokens),
            "tokens_digest": tokens_digest,
        }
    claimed = completion.model_copy(update=fields)
    store.put(key, encode_completions([claimed]))
    return claimed.model_copy(update={"body": b""})


def load_body(uri: str, digest: str | None, store: PayloadStore) -> bytes:
    """Return the body behind a claim check.

    Args:
        uri: The object.
        digest: The body's digest; None: it is not known and not checked.
        store: The payload store.

    Raises:
        UnreadableBody: The object is gone or damaged, or holds another body.
        ServiceUnavailable: The store does not answer.
    """
    try:
        completions, _ = decode_completions(load_object(uri, None, store))
    except MalformedMessage as error:
        raise _damaged(uri, str(error)) from error
    if not completions:
        raise _damaged(uri, "Its object holds no completion that can be decoded.")
    return require_digest(completions[0].body, digest, of=uri)


def load_object(
    uri: str, digest: str | None, store: PayloadStore, *, noun: str = "trajectory"
) -> bytes:
    """Return a whole object, such as a token body or a frame of a journal.

    Args:
        uri: The object.
        digest: The object's digest; None: it is not known and not checked.
        store: The payload store.
        noun: The noun for the content, for errors.

    Raises:
        UnreadableBody: The object is gone or damaged, or holds other bytes.
        ServiceUnavailable: The store does not answer.
    """
    try:
        data = store.get(uri)
    except MalformedMessage as error:
        raise _damaged(uri, str(error), noun) from error
    if data is None:
        raise UnreadableBody(
            f"The {noun} at {uri} is gone.",
            why="Its object was deleted, or this process looks in another payload store.",
            remedy="Check ROLLOUT_PAYLOADS__URL.",
            code=E_BODY_GONE,
        )
    return require_digest(data, digest, of=uri, noun=noun)


def require_digest(body: bytes, digest: str | None, *, of: str, noun: str = "trajectory") -> bytes:
    """Return a body that has this digest; None: the digest is not known.

    Raises:
        UnreadableBody: The body has another digest.
    """
    if digest is not None and digest_of(body) != digest:
        raise _damaged(of, f"Its digest is {digest_of(body)}, and {digest} was accepted.", noun)
    return body


def find_outcomes(run_id: UUID, label: str, store: PayloadStore) -> Iterator[Completion]:
    """Yield the completions in the objects of an attempt, without their bodies.

    An attempt that was executed twice has several objects. Objects that cannot be read are skipped:
    one of them must not keep other attempts from being judged.

    Raises:
        ServiceUnavailable: The store does not answer.
    """
    # Earlier versions wrote one object for each attempt, under this key.
    former = store.uri(f"{run_id}/{label}.frame")
    for uri in (*store.find(payload_prefix(run_id, label)), former):
        if uri.endswith(_TOKENS):
            continue
        try:
            frame = store.get(uri)
            completions = decode_completions(frame)[0] if frame is not None else ()
            for completion in completions:
                require_digest(completion.body, completion.body_digest, of=uri)
                yield completion.model_copy(update={"body": b""})
        except (MalformedMessage, UnreadableBody) as error:
            log.warning("The object %s holds no outcome: %s", uri, error)


def _damaged(of: str, why: str, noun: str = "trajectory") -> UnreadableBody:
    return UnreadableBody(
        f"The {noun} {of} is not the one that was accepted.", why=why, code=E_BODY_DAMAGED
    )
