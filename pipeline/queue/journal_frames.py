"""Frames of journals as bytes, and their objects in the payload store.

Several frames travel in one message to the collector, and a whole journal in the request for the
next attempt: inline, or as an object. Workers, the collector, the dispatcher and the reconciler use
it. Must not: know the trajectory store.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

import orjson

from pipeline.contract.errors import MalformedMessage, UnreadableBody
from pipeline.contract.journal import RecordedCall, read_calls
from pipeline.contract.messages import JournalFrame, RolloutRequest, parse_message
from pipeline.contract.trajectory import digest_of
from pipeline.queue.broker import broker_of
from pipeline.queue.claim_checks import E_BODY_DAMAGED, E_BODY_GONE
from pipeline.queue.payloads import PayloadStore
from pipeline.settings import Settings

_MAGIC = b"RPJ1"
_HEAD = struct.Struct(">4sI")

#: Longer journals go through the payload store.
_INLINE_BYTES = 32 * 1024
#: Upper bound of a frame's header.
_HEADER_BYTES = 700


def encode_frames(frames: Sequence[JournalFrame]) -> bytes:
    """Pack frames: their headers as JSON in front, their bodies behind."""
    index = orjson.dumps(
        {
            "headers": [frame.model_dump_json() for frame in frames],
            "sizes": [len(frame.body) for frame in frames],
        }
    )
    bodies = b"".join(frame.body for frame in frames)
    return _HEAD.pack(_MAGIC, len(index)) + index + bodies


def decode_frames(data: bytes) -> list[JournalFrame]:
    """Unpack frames.

    Raises:
        MalformedMessage: The bytes are something else, or of a later version.
    """
    frames: list[JournalFrame] = []
    try:
        magic, size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("they do not begin with their magic")
        offset = _HEAD.size + size
        index = orjson.loads(data[_HEAD.size : offset])
        for header, length in zip(index["headers"], index["sizes"], strict=True):
            body = data[offset : offset + length]
            if length < 0 or len(body) != length:
                raise ValueError("their length is not that of their index")
            offset += length
            frame = parse_message(JournalFrame, header)
            frames.append(frame.model_copy(update={"body": body}) if body else frame)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise MalformedMessage("Journal frames could not be decoded.", why=str(error)) from error
    return frames


def journal_folder(run_id: UUID, rollout_id: UUID) -> str:
    """Return the folder of all objects of a rollout's journal, for `delete_all`."""
    return f"{run_id}/journals/{rollout_id}"


def check_out_frame(frame: JournalFrame, store: PayloadStore) -> JournalFrame:
    """Put the body into the store; return the frame with its URI instead."""
    digest = digest_of(frame.body)
    folder = journal_folder(frame.run_id, frame.rollout_id)
    uri = store.put(f"{folder}/{frame.attempt_no}-{frame.first}.{digest}", frame.body)
    return frame.model_copy(
        update={
            "body": b"",
            "body_bytes": len(frame.body),
            "body_uri": uri,
            "body_digest": digest,
        }
    )


def inline_bytes_of(settings: Settings) -> int:
    """Return the size up to which a journal travels inside a request."""
    return broker_of(settings).inline_bytes(_INLINE_BYTES)


def travels_inline(n_frames: int, n_bytes: int, *, inline_bytes: int) -> bool:
    """Say whether a journal travels inside the request, and leaves no object behind."""
    return n_bytes + n_frames * _HEADER_BYTES <= inline_bytes


def with_journal(
    request: RolloutRequest,
    frames: Sequence[JournalFrame],
    store: PayloadStore,
    *,
    inline_bytes: int,
) -> RolloutRequest:
    """Return the request with the frames of earlier attempts: inline, else in the payload store.

    Raises:
        ServiceUnavailable: The payload store does not answer.
    """
    data = encode_frames(frames)
    n_bytes = sum(frame.body_bytes for frame in frames)
    if travels_inline(len(frames), n_bytes, inline_bytes=inline_bytes):
        return request.model_copy(update={"journal": base64.b64encode(data).decode()})
    digest = digest_of(data)
    folder = journal_folder(request.run_id, request.rollout_id)
    uri = store.put(f"{folder}/{request.attempt_no}.{digest}", data)
    return request.model_copy(update={"journal_uri": uri, "journal_digest": digest})


def has_journal(request: RolloutRequest) -> bool:
    """Whether earlier attempts recorded calls that this one may replay."""
    return bool(request.journal or request.journal_uri)


class ReadJournal(NamedTuple):
    """The calls that earlier attempts recorded, oldest first, and the size of their frames."""

    calls: list[RecordedCall]
    n_bytes: int


def read_journal(request: RolloutRequest, store: PayloadStore) -> ReadJournal:
    """Return the journal that a request carries.

    Raises:
        UnreadableBody: An object is gone or damaged.
        MalformedMessage: The journal is damaged, or of a later version.
        ServiceUnavailable: The payload store does not answer.
    """
    if request.journal_uri is None:
        try:
            data = base64.b64decode(request.journal, validate=True)
        except ValueError as error:
            raise MalformedMessage("A journal is no base64.", why=str(error)) from error
    else:
        data = _fetch(request.journal_uri, request.journal_digest, store)
    frames = sorted(decode_frames(data), key=lambda frame: (frame.attempt_no, frame.first))
    calls = read_calls(body_of_frame(frame, store) for frame in frames)
    return ReadJournal(calls, sum(frame.body_bytes for frame in frames))


def body_of_frame(frame: JournalFrame, store: PayloadStore) -> bytes:
    """Return the body of a frame, which may be in the payload store.

    Raises:
        UnreadableBody: The object is gone or damaged.
        ServiceUnavailable: The payload store does not answer.
    """
    if frame.body_uri is None:
        return frame.body
    return _fetch(frame.body_uri, frame.body_digest, store)


def _fetch(uri: str, digest: str | None, store: PayloadStore) -> bytes:
    data = store.get(uri)
    if data is None:
        raise UnreadableBody(
            f"The journal at {uri} is gone.",
            why="Its object was deleted, or this process looks in another payload store.",
            remedy="Check ROLLOUT_PAYLOADS__URL.",
            code=E_BODY_GONE,
        )
    if digest is not None and digest_of(data) != digest:
        raise UnreadableBody(
            f"The journal at {uri} is damaged.",
            why=f"Its digest is {digest_of(data)}, not {digest}.",
            code=E_BODY_DAMAGED,
        )
    return data
