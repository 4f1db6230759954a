"""The token body: the tokens of an attempt's calls as bytes, and back.

Packed by the worker when an attempt ends, unpacked by trainers. Ids and logprobs never pass through
JSON. Must not: change what the server recorded.

Layout before compression: `_HEAD`, the names (a JSON list of agent labels and finish reasons), a
table of `_Row` for each call, then the arrays of all calls one after another: new prompt ids,
completion ids (int32), logprobs (float32), little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.model_call import CallTokens, ModelCall
from pipeline.contract.trajectory import compress, decompress
from pipeline.tokens.prompt_prefixes import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"RTK1"
_HEAD = struct.Struct("<4sII")
_ROW = struct.Struct("<10i")
#: Stored where a number is not known.
_UNKNOWN = -1
_NO_TOKENS = CallTokens(b"", b"")

_HAS_TOKENS, _HAS_LOGPROBS, _TRAINABLE, _REPLAYED = 1, 2, 4, 8


class _Row(NamedTuple):
    sequence: int
    prefix_call: int
    prefix_len: int
    n_new: int
    n_completion: int
    flags: int
    version_before: int
    version_after: int
    agent: int  #: index of a name
    finish_reason: int  #: index of a name, or -1


@dataclass(frozen=True, slots=True, eq=False)
class SampledCall:
    """The tokens of one call.

    `prompt` and `completion` are int32 arrays, None if the server recorded no ids. `logprobs` is
    float32 of the completion's length, or None. A `version` of -1 is not known.
    """

    sequence: int
    prompt: np.ndarray[Any, Any] | None
    completion: np.ndarray[Any, Any] | None
    logprobs: np.ndarray[Any, Any] | None = None
    agent: str = ""
    finish_reason: str | None = None
    version_before: int = _UNKNOWN
    version_after: int = _UNKNOWN
    trainable: bool = True
    replayed: bool = False

    @property
    def version(self) -> int:
        """The smaller known version: weights may be updated during a call."""
        known = [each for each in (self.version_before, self.version_after) if each != _UNKNOWN]
        return min(known, default=_UNKNOWN)


def pack_tokens(calls: Sequence[ModelCall]) -> bytes:
    """Return the token body of calls; empty if none of them has tokens."""
    if all(call.tokens is None for call in calls):
        return b""
    names: dict[str, int] = {}
    table: list[bytes] = []
    for call in calls:
        tokens = call.tokens or _NO_TOKENS
        row = _Row(
            call.sequence,
            tokens.prefix_call,
            tokens.prefix_len,
            len(tokens.new_prompt) // ITEM_BYTES,
            len(tokens.completion) // ITEM_BYTES,
            _flags(call),
            _UNKNOWN if call.policy_version_before is None else call.policy_version_before,
            _UNKNOWN if call.policy_version is None else call.policy_version,
            names.setdefault(call.agent, len(names)),
            -1 if call.finish_reason is None else names.setdefault(call.finish_reason, len(names)),
        )
        table.append(_ROW.pack(*row))
    text = json.dumps(list(names)).encode()
    tokens_of = [call.tokens for call in calls if call.tokens is not None]
    return compress(
        b"".join(
            (
                _HEAD.pack(_MAGIC, len(calls), len(text)),
                text,
                *table,
                *(tokens.new_prompt for tokens in tokens_of),
                *(tokens.completion for tokens in tokens_of),
                *(tokens.logprobs for tokens in tokens_of if tokens.logprobs is not None),
            )
        )
    )


def unpack_tokens(body: bytes, earlier: Iterable[SampledCall] = ()) -> list[SampledCall]:
    """Return the calls of a token body, each with its whole prompt.

    Args:
        body: From `pack_tokens`; an empty one has no calls.
        earlier: Calls of bodies before this one, whose prompts this one may continue.

    Raises:
        MalformedMessage: The bytes are no token body, or it continues a call that is not known.
    """
    if not body:
        return []
    data = decompress(body)
    try:
        return _read(data, earlier)
    except (struct.error, ValueError, LookupError, TypeError) as error:
        raise MalformedMessage("A token body could not be read.", why=str(error)) from error


def _read(data: bytes, earlier: Iterable[SampledCall]) -> list[SampledCall]:
    import numpy as np

    magic, n_calls, names_size = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("its first bytes are not those of a token body")
    start = _HEAD.size + names_size
    names = json.loads(data[_HEAD.size : start])
    end = start + n_calls * _ROW.size
    rows = [_Row(*values) for values in _ROW.iter_unpack(data[start:end])]
    ids, logprobs = np.frombuffer(data, "<i4", offset=end), np.frombuffer(data, "<f4", offset=end)
    at_new, at_completion = 0, sum(row.n_new for row in rows)
    at_logprobs = at_completion + sum(row.n_completion for row in rows)
    whole = {
        call.sequence: np.concatenate([call.prompt, call.completion])
        for call in earlier
        if call.prompt is not None and call.completion is not None
    }
    calls: list[SampledCall] = []
    for row in rows:
        prompt = completion = found = None
        if row.flags & _HAS_TOKENS:
            prefix = whole[row.prefix_call] if row.prefix_len else ids[:0]
            if not 0 <= row.prefix_len <= len(prefix) or min(row.n_new, row.n_completion) < 0:
                raise ValueError(f"call {row.sequence} continues more than call {row.prefix_call}")
            new = _part(ids, at_new, row.n_new)
            completion = _part(ids, at_completion, row.n_completion)
            whole[row.sequence] = np.concatenate([prefix[: row.prefix_len], new, completion])
            prompt = whole[row.sequence][: row.prefix_len + row.n_new]
            at_new, at_completion = at_new + row.n_new, at_completion + row.n_completion
        if row.flags & _HAS_LOGPROBS:
            found = _part(logprobs, at_logprobs, row.n_completion)
            at_logprobs += row.n_completion
        calls.append(
            SampledCall(
                sequence=row.sequence,
                prompt=prompt,
                completion=completion,
                logprobs=found,
                agent=names[row.agent],
                finish_reason=None if row.finish_reason < 0 else names[row.finish_reason],
                version_before=row.version_before,
                version_after=row.version_after,
                trainable=bool(row.flags & _TRAINABLE),
                replayed=bool(row.flags & _REPLAYED),
            )
        )
    if at_logprobs != len(ids):
        raise ValueError("its length differs from the length in its table")
    return calls


def _part(items: Any, start: int, length: int) -> Any:
    part = items[start : start + length]
    if len(part) != length:
        raise ValueError("it ends before its last array")
    return part


def _flags(call: ModelCall) -> int:
    flags = _TRAINABLE * call.trainable | _REPLAYED * call.replayed
    if call.tokens is not None:
        flags |= _HAS_TOKENS | _HAS_LOGPROBS * (call.tokens.logprobs is not None)
    return flags
