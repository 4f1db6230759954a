"""The bytes of completions: JSON headers in front, compressed bodies and token bodies behind them.

Used for messages and for objects in the payload store, so that an object alone is enough to
recover an outcome. Must not: know brokers or stores.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
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


def encode_completions(completions: Sequence[Completion]) -> bytes:
    """Pack completions into one frame.

    Without token bodies it is a frame that versions without them can read.
    """
    headers = [completion.model_dump_json(exclude=_empty(completion)) for completion in completions]
    bodies = [completion.body for completion in completions]
    return _pack(headers, bodies, [completion.tokens for completion in completions])


def decode_completions(frame: bytes) -> tuple[list[Completion], list[MalformedCompletion]]:
    """Unpack a frame into completions and malformed ones; each is decoded independently.

    Raises:
        MalformedMessage: The bytes are no frame at all.
    """
    frame = unsealed(bytes(frame))
    try:
        index, start = _read_index(frame)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise MalformedMessage("A completion message is no frame.", why=str(error)) from error
    at_body, at_tokens = start, start + sum(index.sizes)
    good: list[Completion] = []
    bad: list[MalformedCompletion] = []
    for header, size, tokens_size in zip(
        index.headers, index.sizes, index.tokens_sizes, strict=True
    ):
        body = frame[at_body : at_body + size]
        tokens = frame[at_tokens : at_tokens + tokens_size]
        at_body, at_tokens = at_body + size, at_tokens + tokens_size
        try:
            completion = parse_message(Completion, header)
            bodies = {"body": body, "tokens": tokens} if body or tokens else None
            good.append(completion.model_copy(update=bodies) if bodies else completion)
        except MalformedMessage as error:
            bad.append(MalformedCompletion(str(error), _pack([header], [body], [tokens])))
    return good, bad


def _empty(completion: Completion) -> set[str]:
    fields = set[str]() if completion.tokens_digest else _TOKEN_FIELDS
    return fields if completion.calls_replayed else fields | _REPLAY_FIELDS


class _Index(NamedTuple):
    headers: list[str]
    sizes: list[int]
    tokens_sizes: list[int]


def _read_index(frame: bytes) -> tuple[_Index, int]:
    """Return the index of a frame, and the position of the first body."""
    magic, size = _HEAD.unpack_from(frame)
    found = orjson.loads(frame[_HEAD.size : _HEAD.size + size])
    headers, sizes = found["headers"], found["sizes"]
    tokens_sizes = found.get("tokens_sizes", [0] * len(sizes))
    if magic != _MAGIC or not len(headers) == len(sizes) == len(tokens_sizes):
        raise ValueError("the frame does not begin with its magic and a complete index")
    lengths = [*sizes, *tokens_sizes]
    if any(type(each) is not int for each in lengths) or any(type(h) is not str for h in headers):
        raise ValueError("the index holds values other than headers and sizes")
    start = _HEAD.size + size
    if start + sum(lengths) != len(frame) or min(lengths, default=0) < 0:
        raise ValueError("the frame's length is not that of its index")
    return _Index(headers, sizes, tokens_sizes), start


def _pack(headers: Sequence[str], bodies: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    index: dict[str, Any] = {"headers": headers, "sizes": list(map(len, bodies))}
    if any(tokens):
        index["tokens_sizes"] = list(map(len, tokens))
    data = orjson.dumps(index)
    return _HEAD.pack(_MAGIC, len(data)) + data + b"".join((*bodies, *tokens))
