"""The bytes of completions: JSON headers in front, compressed bodies behind them.

Used for messages and for objects in the payload store, so that an object alone is enough to
recover an outcome. Must not: know brokers or stores.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.messages import Completion, parse_message
from pipeline.queue.signing import unsealed

_MAGIC = b"RPC1"
_HEAD = struct.Struct(">4sI")


@dataclass(frozen=True, slots=True)
class MalformedCompletion:
    """A completion that could not be decoded: the reason, and a frame with it alone."""

    reason: str
    raw: bytes


def encode_completions(completions: Sequence[Completion]) -> bytes:
    """Pack completions into one frame."""
    headers = [completion.model_dump_json() for completion in completions]
    return _pack(headers, [completion.body for completion in completions])


def decode_completions(frame: bytes) -> tuple[list[Completion], list[MalformedCompletion]]:
    """Unpack a frame into completions and malformed ones; each is decoded independently.

    Raises:
        MalformedMessage: The bytes are no frame at all.
    """
    frame = unsealed(bytes(frame))
    try:
        magic, size = _HEAD.unpack_from(frame)
        index = orjson.loads(frame[_HEAD.size : _HEAD.size + size])
        headers, sizes = index["headers"], index["sizes"]
        if magic != _MAGIC or len(headers) != len(sizes):
            raise ValueError("the frame does not begin with its magic and a complete index")
        if any(type(size) is not int for size in sizes) or any(type(h) is not str for h in headers):
            raise ValueError("the index holds values other than headers and sizes")
        if _HEAD.size + size + sum(sizes) != len(frame) or min(sizes, default=0) < 0:
            raise ValueError("the frame's length is not that of its index")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise MalformedMessage("A completion message is no frame.", why=str(error)) from error
    good: list[Completion] = []
    bad: list[MalformedCompletion] = []
    offset = _HEAD.size + size
    for header, body_size in zip(headers, sizes, strict=True):
        body = frame[offset : offset + body_size]
        offset += body_size
        try:
            completion = parse_message(Completion, header)
            good.append(completion.model_copy(update={"body": body}) if body else completion)
        except MalformedMessage as error:
            bad.append(MalformedCompletion(str(error), _pack([header], [body])))
    return good, bad


def _pack(headers: Sequence[str], bodies: Sequence[bytes]) -> bytes:
    index = orjson.dumps({"headers": headers, "sizes": [len(body) for body in bodies]})
    return _HEAD.pack(_MAGIC, len(index)) + index + b"".join(bodies)
