"""Segments: the calls of one attempt as the rows that a trainer computes a loss on.

A call whose prompt begins with the whole prompt and completion of another call continues it. The
calls that continue each other form one segment; its tokens are the prompt and completion of its
last call. Tokens are never repaired: a prompt that differs in one token begins a segment of its
own. Pure functions on numpy arrays, shared by trainer client and agent library. Must not: know the
store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pipeline.contract.model_call import ABORTED
from pipeline.contract.train_batch import SegmentChoice, TruncatedChoice
from pipeline.tokens.prompt_prefixes import ITEM_BYTES, common_bytes
from pipeline.tokens.token_body import SampledCall

#: Servers write this number, or a smaller one, for a token whose logprob is not known.
MISSING_LOGPROB = -9999.0
#: Version of tokens that were not sampled, or whose version is not known.
NO_VERSION = -1

#: How a segment begins: at the attempt's first call; inside another segment; with a prompt that
#: differs inside the completion before it; with one that differs earlier.
Origin = Literal["start", "branch", "drift", "rewrite"]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens to train on, with equal lengths.

    `token_ids` and `versions` are int32, `loss_mask` uint8 (1 on what the model sampled and no
    other segment trains), `logprobs` float32: 0 where the mask is 0, NaN where the server gave no
    logprob. `versions` is -1 where the mask is 0 or the version is not known.
    """

    token_ids: np.ndarray[Any, Any]
    loss_mask: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    versions: np.ndarray[Any, Any]
    calls: tuple[int, ...]  #: sequence numbers of the calls that it trains
    agent: str = ""
    origin: Origin = "start"
    truncated: bool = False  #: one of its completions ended at a limit of tokens

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self.loss_mask)

    @property
    def has_logprobs(self) -> bool:
        """Whether the server gave a logprob for each trained token."""
        return not np.isnan(self.logprobs).any()

    @property
    def prompt_ids(self) -> np.ndarray[Any, Any]:
        """The tokens before the first trained one, for rows of prompt and response."""
        return self.token_ids[: self.prompt_length]

    @property
    def response_ids(self) -> np.ndarray[Any, Any]:
        """The tokens from the first trained one on."""
        return self.token_ids[self.prompt_length :]

    @property
    def response_mask(self) -> np.ndarray[Any, Any]:
        """The loss mask of the response."""
        return self.loss_mask[self.prompt_length :]

    @property
    def response_logprobs(self) -> np.ndarray[Any, Any] | None:
        """The logprobs of the response; None unless each trained token has one."""
        return self.logprobs[self.prompt_length :] if self.has_logprobs else None


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one attempt, by their first calls, and the number of calls left out.

    `missing` are calls that could be trained if the server had recorded ids, `untrained` aborted,
    empty and judge calls, `dropped` segments left out for `truncated="drop"`.
    """

    segments: tuple[Segment, ...]
    missing: int = 0
    untrained: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class _Chain:
    calls: list[_Call]
    origin: Origin = "start"

    @property
    def end(self) -> _Call:
        return self.calls[-1]


@dataclass(slots=True, eq=False)
class _Call:
    call: SampledCall
    prompt: bytes
    whole: bytes  #: prompt and completion
    chain: _Chain | None = field(default=None, repr=False)


def merge_calls(calls: Iterable[SampledCall], *, truncated: TruncatedChoice = "train") -> Segments:
    """Return the segments of one attempt's calls; their order and repeated calls do not count.

    Args:
        calls: Each with its whole prompt.
        truncated: `train` on completions that a limit of tokens cut off, `mask_turn` to keep them
            as context only, or `drop` their segments.
    """
    known = {call.sequence: call for call in sorted(calls, key=lambda call: call.sequence)}
    trained = [call for call in known.values() if is_trained(call)]
    missing = sum(_is_missing(call) for call in known.values())
    chains: list[_Chain] = []
    for agent in dict.fromkeys(call.agent for call in trained):
        chains += _chains([call for call in trained if call.agent == agent])
    chains.sort(key=lambda chain: chain.calls[0].call.sequence)
    segments = [_segment(chain, truncated) for chain in chains]
    kept = [
        each
        for each in segments
        if each.loss_mask.any() and not (truncated == "drop" and each.truncated)
    ]
    return Segments(
        tuple(kept),
        missing=missing,
        untrained=len(known) - len(trained) - missing,
        dropped=len(segments) - len(kept),
    )


def choose_segments(segments: Sequence[Segment], choice: SegmentChoice) -> tuple[Segment, ...]:
    """Return the segments of one attempt that become rows.

    Args:
        segments: From `merge_calls`.
        choice: `last` is the segment that trains the last call, `longest` the one with the most
            tokens.

    Raises:
        ValueError: The choice is `error`, and there are several.
    """
    if len(segments) < 2 or choice == "all":
        return tuple(segments)
    if choice == "error":
        origins = ", ".join(f"{segment.origin} ({len(segment.token_ids)})" for segment in segments)
        raise ValueError(f"its calls form {len(segments)} segments: {origins}")
    if choice == "last":
        return (max(segments, key=lambda segment: max(segment.calls)),)
    return (max(segments, key=lambda segment: len(segment.token_ids)),)


def is_trained(call: SampledCall) -> bool:
    """Say whether the completion of a call is a sample of the policy with recorded ids."""
    return (
        call.trainable
        and call.prompt is not None
        and call.completion is not None
        and len(call.completion) > 0
        and call.finish_reason not in ABORTED
    )


def _is_missing(call: SampledCall) -> bool:
    return call.completion is None and call.finish_reason not in ABORTED


def _chains(calls: Sequence[SampledCall]) -> list[_Chain]:
    """Return the chains of one agent's calls."""
    entries = [_entry(call) for call in calls]
    chains: list[_Chain] = []
    # A call's parent has a shorter prompt, so it is placed before the call.
    entries.sort(key=lambda entry: (len(entry.prompt), entry.call.sequence))
    for number, entry in enumerate(entries):
        parent = _parent(entry, entries[:number])
        if parent is not None and parent.chain is not None and parent.chain.end is parent:
            entry.chain = parent.chain
            entry.chain.calls.append(entry)
            continue
        entry.chain = _Chain([entry], "branch" if parent else _root_origin(entry, entries))
        chains.append(entry.chain)
    return chains


def _entry(call: SampledCall) -> _Call:
    assert call.prompt is not None
    assert call.completion is not None
    prompt = call.prompt.astype("<i4", copy=False).tobytes()
    return _Call(call, prompt, prompt + call.completion.astype("<i4", copy=False).tobytes())


def _parent(entry: _Call, placed: Sequence[_Call]) -> _Call | None:
    """Return the call that this one continues: the longest one, and one that can be extended."""
    best: _Call | None = None
    for other in reversed(placed):
        if best is not None and len(other.whole) < len(best.whole):
            continue
        if not entry.prompt.startswith(other.whole):
            continue
        is_longer = best is None or len(other.whole) > len(best.whole)
        if is_longer or _can_be_extended(other) or not _can_be_extended(best):
            best = other
    return best


def _can_be_extended(entry: _Call | None) -> bool:
    return entry is not None and entry.chain is not None and entry.chain.end is entry


def _root_origin(entry: _Call, entries: Sequence[_Call]) -> Origin:
    """Say why a call continues none: compared with the agent's calls before it in time."""
    earlier = [other for other in entries if other.call.sequence < entry.call.sequence]
    if not earlier:
        return "start"
    common = {id(other): common_bytes(other.whole, entry.prompt) for other in earlier}
    nearest = max(earlier, key=lambda other: (common[id(other)], other.call.sequence))
    length = common[id(nearest)]
    if length == len(entry.prompt):
        return "start"  # the same prompt was sampled again
    return "drift" if length > len(nearest.prompt) else "rewrite"


def _segment(chain: _Chain, truncated: TruncatedChoice) -> Segment:
    tokens = np.frombuffer(chain.end.whole, "<i4")
    mask = np.zeros(len(tokens), np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), NO_VERSION, np.int32)
    trained = [
        entry
        for entry in chain.calls
        if truncated != "mask_turn" or entry.call.finish_reason != "length"
    ]
    for entry in trained:
        part = slice(len(entry.prompt) // ITEM_BYTES, len(entry.whole) // ITEM_BYTES)
        mask[part] = 1
        logprobs[part] = _known_logprobs(entry.call)
        versions[part] = entry.call.version
    segment = Segment(
        tokens,
        mask,
        logprobs,
        versions,
        calls=tuple(entry.call.sequence for entry in trained),
        agent=chain.end.call.agent,
        origin=chain.origin,
        truncated=any(entry.call.finish_reason == "length" for entry in chain.calls),
    )
    _require_consistent(segment, [entry.call for entry in trained])
    return segment


def _known_logprobs(call: SampledCall) -> Any:
    if call.logprobs is None:
        return np.nan
    return np.where(call.logprobs > MISSING_LOGPROB, call.logprobs, np.nan)


def _require_consistent(segment: Segment, calls: Sequence[SampledCall]) -> None:
    """Check what every trainer relies on; it costs little compared with a training step."""
    lengths = {
        len(segment.token_ids),
        len(segment.loss_mask),
        len(segment.logprobs),
        len(segment.versions),
    }
    sampled = sum(len(call.completion) for call in calls if call.completion is not None)
    if len(lengths) != 1 or int(segment.loss_mask.sum()) != sampled:
        raise AssertionError("A segment does not train each sampled token of its calls once.")
    if np.any(segment.logprobs[segment.loss_mask == 0]):
        raise AssertionError("A segment has logprobs of tokens that were not sampled.")
