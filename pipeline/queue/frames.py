"""Frames: several messages as bytes, their JSON headers in front, their compressed bodies behind.

Used for messages and for objects in the payload store, so that an object alone is enough to
recover an outcome. `journal_frames.py` packs the calls of journals in the same form. Must not: know
brokers or stores.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import orjson

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.messages import Completion, parse_message
from pipeline.queue.signing import unsealed

_MAGIC = b"RPC1"
_HEAD = struct.Struct(">4sI")
#: Left out where they are empty: versions without them reject their names.
_TOKEN_FIELDS = {"tokens_bytes", "tokens_uri", "tokens_digest"}
_REPLAY_FIELDS = {"calls_replayed", "replayed_from", "tokens_saved"}


@dataclass(frozen=True, slots=True)
class MalformedCompletion:
    """A completion that could not be decoded: the reason, and a frame with it alone."""

    reason: str
    raw: bytes


class FrameEntry(NamedTuple):
    """One message of a frame: its JSON header, its body and its token body."""

    header: str
    body: bytes
    tokens: bytes


def encode_completions(completions: Sequence[Completion]) -> bytes:
    """Pack completions into one frame.

    Without token bodies it is a frame that versions without them can read.
    """
    return pack_frame(
        _MAGIC,
        [completion.model_dump_json(exclude=_empty(completion)) for completion in completions],
        [completion.body for completion in completions],
        [completion.tokens for completion in completions],
    )


def decode_completions(frame: bytes) -> tuple[list[Completion], list[MalformedCompletion]]:
    """Unpack a frame into completions and malformed ones; each is decoded independently.

    Raises:
        MalformedMessage: The bytes are no frame at all.
    """
    good: list[Completion] = []
    bad: list[MalformedCompletion] = []
    for header, body, tokens in unpack_frame(_MAGIC, unsealed(bytes(frame)), kind="completion"):
        try:
            completion = parse_message(Completion, header)
            bodies = {"body": body, "tokens": tokens} if body or tokens else None
            good.append(completion.model_copy(update=bodies) if bodies else completion)
        except MalformedMessage as error:
            raw = pack_frame(_MAGIC, [header], [body], [tokens])
            bad.append(MalformedCompletion(str(error), raw))
    return good, bad


def pack_frame(
    magic: bytes, headers: Sequence[str], bodies: Sequence[bytes], tokens: Sequence[bytes] = ()
) -> bytes:
    """Return a frame: its magic, an index with all headers, all bodies, all token bodies."""
    index: dict[str, Any] = {"headers": headers, "sizes": list(map(len, bodies))}
    if any(tokens):
        index["tokens_sizes"] = list(map(len, tokens))
    data = orjson.dumps(index)
    return _HEAD.pack(magic, len(data)) + data + b"".join((*bodies, *tokens))


def unpack_frame(magic: bytes, frame: bytes, *, kind: str) -> list[FrameEntry]:
    """Return the entries of a frame; their headers are not decoded.

    Args:
        magic: The first bytes of a frame of this kind.
        frame: What `pack_frame` returned.
        kind: The kind of message, for the error.

    Raises:
        MalformedMessage: The bytes are no frame of this kind.
    """
    try:
        found_magic, index_size = _HEAD.unpack_from(frame)
        start = _HEAD.size + index_size
        index = orjson.loads(frame[_HEAD.size : start])
        headers, sizes = index["headers"], index["sizes"]
        tokens_sizes = index.get("tokens_sizes", [0] * len(sizes))
        if found_magic != magic or not len(headers) == len(sizes) == len(tokens_sizes):
            raise ValueError("the frame does not begin with its magic and a complete index")
        lengths = [*sizes, *tokens_sizes]
        if any(type(n) is not int for n in lengths) or any(type(h) is not str for h in headers):
            raise ValueError("the index holds values other than headers and sizes")
        if start + sum(lengths) != len(frame) or min(lengths, default=0) < 0:
            raise ValueError("the frame's length is not that of its index")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise MalformedMessage(f"A {kind} message is no frame.", why=str(error)) from error
    ends = list(accumulate(lengths, initial=start))
    parts = [frame[begin:end] for begin, end in pairwise(ends)]
    return list(map(FrameEntry, headers, parts[: len(headers)], parts[len(headers) :]))


def _empty(completion: Completion) -> set[str]:
    fields = set[str]() if completion.tokens_digest else _TOKEN_FIELDS
    return fields if completion.calls_replayed else fields | _REPLAY_FIELDS
