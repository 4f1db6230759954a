"""The record of an attempt as it is stored and handed to trainers.

Built by the worker (`workers/process/records.py`), compressed there, stored as bytes, read by
trainers and the command line. Must not: know agents, tools or the database.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import orjson
import zstandard
from pydantic import BaseModel, ConfigDict

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.model_call import ModelCall

#: Largest unpacked body. Larger ones are rejected: a forged frame must not exhaust the memory.
MAX_BODY_BYTES = 512 * 1024 * 1024


class _Compressors(threading.local):
    """The compressors of a thread; to make one takes twice the time of compressing a short body."""

    def __init__(self) -> None:
        self.of_records = zstandard.ZstdCompressor(level=3)
        #: For data that hardly repeats itself.
        self.of_arrays = zstandard.ZstdCompressor(level=1)


_compressors = _Compressors()


class TrajectoryRecord(BaseModel):
    """The record of an attempt.

    `messages` is the conversation in the OpenAI format; `steps` are the agent library's own steps
    as dicts; `tools` counts calls and errors by tool name.
    """

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    calls: list[ModelCall] = []
    tools: dict[str, dict[str, int]] = {}
    metadata: dict[str, Any] = {}

    @property
    def final_answer(self) -> str:
        """The text that was scored: the last answer, also one that an interaction replied to."""
        for step in reversed(self.steps):
            if step.get("step_type") == "final_answer" or "answered_by" in step.get("metadata", {}):
                return str(step.get("content") or "")
        return ""


def pack_record(
    record: TrajectoryRecord, *, redact: Callable[[bytes], bytes] = lambda data: data
) -> bytes:
    """Compress a record to the bytes that are sent and stored (codec `zstd+json`).

    Args:
        record: Lone surrogates and integers of any size are kept.
        redact: Removes secrets from the JSON.

    Raises:
        TypeError: The record holds a value that JSON does not have.
    """
    document = record.model_dump(exclude={"calls"})
    document["calls"] = [call.model_dump(exclude_defaults=True) for call in record.calls]
    return _compressors.of_records.compress(redact(dump_json(document)))


def unpack_record(body: bytes, codec: str = "zstd+json") -> TrajectoryRecord:
    """Read a stored body.

    Raises:
        MalformedMessage: The bytes are not a record of this codec.
    """
    if codec != "zstd+json":
        raise MalformedMessage(f"A trajectory has the unknown codec {codec!r}.")
    try:
        return TrajectoryRecord.model_validate(load_json(decompress(body)))
    except ValueError as error:
        raise MalformedMessage("A trajectory could not be unpacked.", why=str(error)) from error


def compress(data: bytes) -> bytes:
    """Compress data that hardly repeats itself, such as ids and logprobs."""
    return _compressors.of_arrays.compress(data)


def decompress(body: bytes) -> bytes:
    """Return the data of a compressed body.

    Raises:
        MalformedMessage: The bytes are not compressed, or would unpack to too many.
    """
    try:
        size = zstandard.frame_content_size(body)
        if size > MAX_BODY_BYTES:
            raise MalformedMessage(f"A trajectory would unpack to {size} bytes.")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_BODY_BYTES)
    except zstandard.ZstdError as error:
        raise MalformedMessage("A trajectory could not be unpacked.", why=str(error)) from error


def digest_of(body: bytes) -> str:
    """Return the digest of a stored body: BLAKE2b with 128 bits, as 32 hexadecimal digits."""
    return blake2b(body, digest_size=16).hexdigest()


def dump_json(document: Any) -> bytes:
    """Return a document as JSON on one line; lone surrogates are allowed.

    Raises:
        TypeError: The document holds a value that JSON does not have.
    """
    try:
        return orjson.dumps(document)
    except TypeError:
        # Models write lone surrogates, and tools return integers beyond 64 bits: orjson takes
        # neither.
        return json.dumps(document).encode()


def load_json(raw: bytes) -> Any:
    """Return the document in the JSON that `dump_json` wrote.

    Raises:
        ValueError: The bytes are no JSON.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)
