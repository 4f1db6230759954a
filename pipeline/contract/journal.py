"""The journal of a rollout: the answers of its model calls, kept while an attempt runs.

A worker packs the newest calls into the body of a `JournalFrame`; the worker of the next attempt
reads the bodies and answers equal requests from them. Must not: hold a request, which may be long
and contain secrets; its digest is enough.

Layout of a body before compression: `_HEAD`, a JSON list with one object for each call, then the
token ids and logprobs of all calls as bytes, in the order of the list.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from pipeline.contract.errors import ErrorClass, MalformedMessage
from pipeline.contract.trajectory import compress, decompress, digest_of, dump_json, load_json

#: Errors after which the next attempt goes on where this one was; all others start afresh.
RESUMED_AFTER = frozenset(
    {
        ErrorClass.WORKER_LOST,
        ErrorClass.WORKER_STOPPED,
        ErrorClass.SANDBOX,
        ErrorClass.MODEL_RATE_LIMIT,
        ErrorClass.MODEL_TRANSPORT,
    }
)

_MAGIC = b"RJC1"
_HEAD = struct.Struct(">4sI")

#: Fields of a request that the worker itself adds, and that do not change an answer.
_OWN_FIELDS = frozenset({"user"})

#: A call's attempt, and its number in that attempt's journal: a worker counts the calls; a gateway
#: takes the time of the answer in nanoseconds, because others may serve the same attempt.
CallKey = tuple[int, int]


class RecordedTokens(NamedTuple):
    """The tokens of a call: ids as int32 and logprobs as float32, little-endian.

    The prompt is the first `prefix_bytes` of the prompt and completion of the call `prefix`,
    followed by `new_prompt`.
    """

    new_prompt: bytes
    completion: bytes
    logprobs: bytes | None = None
    prefix: CallKey | None = None
    prefix_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The answer to one request.

    `result` holds JSON values. In calls that were read from a journal, `tokens` has the whole
    prompt and no prefix.
    """

    key: CallKey
    digest: str
    result: Mapping[str, Any]
    tokens: RecordedTokens | None = None

    @property
    def version(self) -> int | None:
        """The smaller version of the weights that answered; None: not known, or a tool's result."""
        after = self.result.get("policy_version")
        if after is None:
            return None
        return min(after, self.result.get("metadata", {}).get("policy_version_before", after))


def digest_of_request(
    messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str | None:
    """Return the digest of a request's canonical JSON: messages, tools, model, sampling parameters.

    Returns:
        32 hexadecimal digits; None if the request is no JSON.
    """
    asked = {
        name: value
        for name, value in options.items()
        if value is not None and name not in _OWN_FIELDS
    }
    return digest_of_value([messages, asked])


def digest_of_value(value: Any) -> str | None:
    """Return the digest of a value's canonical JSON; None if the value is no JSON."""
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        try:
            # Lone surrogates and integers beyond 64 bits.
            data = json.dumps(value, sort_keys=True).encode()
        except (TypeError, ValueError):
            return None
    return digest_of(data)


def pack_calls(
    calls: Iterable[RecordedCall], *, redact: Callable[[bytes], bytes] = lambda data: data
) -> bytes:
    """Return the body of a frame with these calls; empty if there is none to keep.

    A call is left out if its result contains a secret, because with the secret masked it would not
    be the model's answer any more, or if its result is no JSON.
    """
    entries: list[bytes] = []
    arrays: list[bytes] = []
    for call in calls:
        tokens = call.tokens
        entry: dict[str, Any] = {"key": call.key, "digest": call.digest, "result": call.result}
        if tokens is not None:
            parts = (tokens.new_prompt, tokens.completion, tokens.logprobs)
            entry["sizes"] = [None if part is None else len(part) for part in parts]
            entry["prefix"], entry["prefix_bytes"] = tokens.prefix, tokens.prefix_bytes
        try:
            data = dump_json(entry)
        except (TypeError, ValueError):
            continue
        if redact(data) != data:
            continue
        entries.append(data)
        if tokens is not None:
            arrays += [part for part in (tokens.new_prompt, tokens.completion) if part]
            arrays.append(tokens.logprobs or b"")
    if not entries:
        return b""
    index = b"[" + b",".join(entries) + b"]"
    return compress(_HEAD.pack(_MAGIC, len(index)) + index + b"".join(arrays))


def read_calls(bodies: Iterable[bytes]) -> list[RecordedCall]:
    """Return the calls in the bodies of a rollout's frames, each with its whole prompt.

    A call whose prompt continues one that is not there is left out.

    Args:
        bodies: In order of attempts, and of their calls.

    Raises:
        MalformedMessage: A body cannot be read.
    """
    calls: list[RecordedCall] = []
    whole: dict[CallKey, bytes] = {}
    for body in bodies:
        try:
            calls += _read(body, whole)
        except (struct.error, ValueError, TypeError, LookupError) as error:
            raise MalformedMessage("A journal could not be read.", why=str(error)) from error
    return calls


def _read(body: bytes, whole: dict[CallKey, bytes]) -> Iterable[RecordedCall]:
    data = decompress(body)
    magic, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("it does not begin with its magic")
    at = _HEAD.size + length
    found: list[RecordedCall] = []
    for entry in load_json(data[_HEAD.size : at]):
        attempt_no, sequence = entry["key"]
        key = (int(attempt_no), int(sequence))
        tokens = None
        if sizes := entry.get("sizes"):
            parts: list[bytes | None] = []
            for part_size in sizes:
                part = None if part_size is None else data[at : at + part_size]
                if part is not None and len(part) != part_size:
                    raise ValueError("it ends before its last array")
                parts.append(part)
                at += part_size or 0
            tokens = _with_whole_prompt(entry, parts, whole)
            if tokens is None:
                continue
            whole[key] = tokens.new_prompt + tokens.completion
        found.append(RecordedCall(key, str(entry["digest"]), dict(entry["result"]), tokens))
    return found


def _with_whole_prompt(
    entry: Mapping[str, Any], parts: Sequence[bytes | None], whole: Mapping[CallKey, bytes]
) -> RecordedTokens | None:
    new_prompt, completion, logprobs = parts
    prefix_bytes = entry["prefix_bytes"]
    before = b""
    if prefix_bytes:
        known = whole.get(tuple(entry["prefix"]))
        if known is None or len(known) < prefix_bytes:
            return None
        before = known[:prefix_bytes]
    return RecordedTokens(before + (new_prompt or b""), completion or b"", logprobs)
