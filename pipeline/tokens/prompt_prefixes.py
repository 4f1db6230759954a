"""Stores each prompt of an attempt as what is new to the calls before it.

Used by the worker for every answer with token ids. A trajectory of T tokens then takes O(T) bytes
and not O(T x calls). Must not: import numpy, which a worker loads only to read tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from pipeline.contract.model_call import CallTokens

#: Bytes of an id and of a logprob.
ITEM_BYTES = 4
#: Ids are stored as int32.
MAX_ID = 2**31 - 1
#: Sequences that a new prompt is compared with: the newest that no later call continued.
_MOST_OPEN = 16


class PromptPrefixes:
    """The sequences of one attempt's calls that a later prompt may continue."""

    def __init__(self) -> None:
        self._open: dict[int, bytes] = {}

    def add(
        self,
        sequence: int,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float] | None,
    ) -> CallTokens:
        """Pack the tokens of a call, with the longest prefix that an earlier call has.

        Raises:
            OverflowError: An id does not fit into 31 bits.
            TypeError: An id is no integer.
        """
        packed = None if logprobs is None else _packed("f", logprobs)
        return self.add_packed(sequence, packed_ids(prompt_ids), packed_ids(completion_ids), packed)

    def add_packed(
        self, sequence: int, prompt: bytes, completion: bytes, logprobs: bytes | None
    ) -> CallTokens:
        """Do as `add` for ids and logprobs that are packed already."""
        origin, length = self._longest_prefix(prompt)
        if length and length == len(self._open[origin]):
            del self._open[origin]
        self._open[sequence] = prompt + completion
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return CallTokens(
            new_prompt=prompt[length:],
            completion=completion,
            logprobs=logprobs,
            prefix_call=origin if length else -1,
            prefix_len=length // ITEM_BYTES,
        )

    def _longest_prefix(self, prompt: bytes) -> tuple[int, int]:
        best = (-1, 0)
        for sequence in reversed(self._open):
            known = self._open[sequence]
            length = common_bytes(known, prompt)
            if length > best[1]:
                best = (sequence, length)
            if length == len(known):
                break  # the usual case: the newest call is continued
        return best


def packed_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little-endian.

    Raises:
        OverflowError: An id is negative, or does not fit into 31 bits.
        TypeError: An id is no integer.
    """
    # Unsigned items are packed three times as fast as signed ones, and refuse negative numbers.
    data = _packed("I", ids)
    if not data[ITEM_BYTES - 1 :: ITEM_BYTES].isascii():
        raise OverflowError("a token id does not fit into 31 bits")
    return data


def _packed(kind: str, values: Sequence[int] | Sequence[float]) -> bytes:
    items = array(kind, values)
    if sys.byteorder == "big":
        items.byteswap()
    return items.tobytes()


def common_bytes(first: bytes, second: bytes) -> int:
    """Return the length of the common beginning, in whole items."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    # Comparing slices runs at the speed of memory, unlike a loop over the items.
    low, high = 0, high // ITEM_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        part = slice(low * ITEM_BYTES, middle * ITEM_BYTES)
        if first[part] == second[part]:
            low = middle
        else:
            high = middle
    return low * ITEM_BYTES
