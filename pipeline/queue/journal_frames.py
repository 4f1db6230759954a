"""Frames of journals as bytes, and their objects in the payload store.

Several frames travel in one message to the collector, and a whole journal in the request for the
next attempt: inline, or as an object. Workers, the collector, the dispatcher and the reconciler use
it. Must not: know the trajectory store.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.journal import RecordedCall, read_calls
from pipeline.contract.messages import JournalFrame, RolloutRequest, parse_message
from pipeline.contract.trajectory import digest_of
from pipeline.queue.claim_checks import load_object
from pipeline.queue.frames import pack_frame, unpack_frame
from pipeline.queue.payloads import PayloadStore

_MAGIC = b"RPJ1"

#: Journals up to this size travel inside requests, where the broker takes large messages.
INLINE_JOURNAL_BYTES = 32 * 1024
#: Upper bound of a frame's header.
_HEADER_BYTES = 700


def encode_frames(frames: Sequence[JournalFrame]) -> bytes:
    """Pack frames of journals into one frame of bytes."""
    headers = [frame.model_dump_json() for frame in frames]
    return pack_frame(_MAGIC, headers, [frame.body for frame in frames])


def decode_frames(data: bytes) -> list[JournalFrame]:
    """Unpack frames.

    Raises:
        MalformedMessage: The bytes are something else, or of a later version.
    """
    frames: list[JournalFrame] = []
    for header, body, _ in unpack_frame(_MAGIC, data, kind="journal"):
        frame = parse_message(JournalFrame, header)
        frames.append(frame.model_copy(update={"body": body}) if body else frame)
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
        data = load_object(request.journal_uri, request.journal_digest, store, noun="journal")
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
    return load_object(frame.body_uri, frame.body_digest, store, noun="journal")
