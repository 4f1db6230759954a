"""The token body: what the server recorded, packed and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.model_call import ModelCall
from pipeline.contract.trajectory import compress, decompress
from pipeline.tokens.prompt_prefixes import PromptPrefixes
from pipeline.tokens.token_body import pack_tokens, unpack_tokens

ids = st.lists(st.integers(0, 3), max_size=6)


class Said(NamedTuple):
    """What a server sent for one call."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None = None


def recorded(said: Sequence[Said | None], **fields: Any) -> list[ModelCall]:
    prefixes = PromptPrefixes()
    return [
        ModelCall(
            sequence=number,
            tokens=None if each is None else prefixes.add(number, *each),
            **fields,
        )
        for number, each in enumerate(said)
    ]


@st.composite
def conversations(draw: Any) -> list[Said | None]:
    """Calls of which many continue, branch from or rewrite an earlier one."""
    said: list[Said | None] = []
    for _ in range(draw(st.integers(1, 8))):
        known = [each.prompt + each.completion for each in said if each is not None]
        start = draw(st.sampled_from(known)) if known and draw(st.booleans()) else []
        kept = start[: draw(st.integers(0, len(start)))] if draw(st.booleans()) else start
        completion = draw(ids)
        size = len(completion)
        logprobs = st.lists(st.floats(-50, 0, width=32), min_size=size, max_size=size)
        one = Said(kept + draw(ids), completion, draw(st.none() | logprobs))
        said.append(draw(st.sampled_from([one, one, one, None])))
    return said


@given(conversations())
def test_tokens_unpacked_are_those_that_the_server_sent(said):
    calls = unpack_tokens(pack_tokens(recorded(said)))
    assert len(calls) == (len(said) if any(each is not None for each in said) else 0)
    for call, each in zip(calls, said, strict=False):
        if each is None:
            assert call.prompt is call.completion is call.logprobs is None
            continue
        assert call.prompt is not None
        assert call.completion is not None
        assert call.prompt.tolist() == each.prompt
        assert call.completion.tolist() == each.completion
        assert (call.logprobs is None) == (each.logprobs is None)
        assert call.logprobs is None or call.logprobs.tolist() == each.logprobs


@given(conversations(), st.integers(0, 8))
def test_bodies_of_one_attempt_can_be_read_one_after_the_other(said, cut):
    calls = recorded(said)
    first = unpack_tokens(pack_tokens(calls[:cut]))
    second = unpack_tokens(pack_tokens(calls[cut:]), earlier=first)
    whole = {call.sequence: call for call in unpack_tokens(pack_tokens(calls))}
    for call in (*first, *second):
        same = whole[call.sequence]
        prompts = [each.prompt for each in (call, same)]
        first_ids, ids = [None if prompt is None else prompt.tolist() for prompt in prompts]
        assert first_ids == ids


def test_all_that_a_trainer_needs_of_a_call_is_in_the_token_body():
    said = [Said([1], [2])]
    fields = {
        "agent": "critic",
        "finish_reason": "length",
        "policy_version": 4,
        "policy_version_before": 3,
        "trainable": True,
        "replayed": True,
    }
    (call,) = unpack_tokens(pack_tokens(recorded(said, **fields)))
    assert (call.agent, call.finish_reason, call.trainable, call.replayed) == (
        "critic",
        "length",
        True,
        True,
    )
    assert (call.version_before, call.version_after, call.version) == (3, 4, 3)


def test_a_call_without_a_version_has_version_minus_one():
    (call,) = unpack_tokens(pack_tokens(recorded([Said([1], [2])])))
    assert call.version == -1


def test_calls_without_ids_take_no_token_body():
    assert pack_tokens(recorded([None, None])) == b""
    assert unpack_tokens(b"") == []


def test_a_prompt_that_continues_a_call_is_stored_as_what_is_new():
    turns, seen = [], [7] * 1000
    for turn in range(50):
        completion = [turn] * 100
        turns.append(Said(list(seen), completion, [-0.5] * 100))
        seen += [*completion, 9]
    body = pack_tokens(recorded(turns))
    # Each token once, a logprob for each sampled one, and forty bytes for each call.
    assert len(decompress(body)) < 4 * len(seen) + 4 * 5000 + 50 * 40 + 100


def test_a_prompt_that_goes_back_to_an_older_call_is_stored_by_its_prefix():
    main, side = list(range(100)), list(range(500, 600))
    said = [Said(main, [1]), Said(side, [2]), Said([*main, 1, 3], [4])]
    calls = recorded(said)
    assert calls[2].tokens is not None
    assert (calls[2].tokens.prefix_call, calls[2].tokens.prefix_len) == (0, 101)
    assert unpack_tokens(pack_tokens(calls))[2].prompt.tolist() == [*main, 1, 3]  # type: ignore[union-attr]


@given(st.binary(max_size=80))
def test_no_bytes_raise_anything_but_malformed_message(data):
    for body in (data, compress(data), compress(b"RTK1" + data)):
        try:
            unpack_tokens(body)
        except MalformedMessage:
            pass


@given(conversations(), st.data())
def test_a_damaged_token_body_never_gives_other_lengths(said, data):
    body = pack_tokens(recorded(said))
    if not body:
        return
    raw = bytearray(decompress(body))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        calls = unpack_tokens(compress(bytes(raw)))
    except MalformedMessage:
        return
    for call in calls:
        assert call.logprobs is None or len(call.logprobs) == len(call.completion)  # type: ignore[arg-type]


def test_a_token_body_cut_off_is_refused():
    raw = decompress(pack_tokens(recorded([Said([1, 2], [3], [-1.0])])))
    with pytest.raises(MalformedMessage):
        unpack_tokens(compress(raw[:-4]))
    with pytest.raises(MalformedMessage):
        unpack_tokens(compress(raw + b"\0\0\0\0"))


def test_fifty_calls_that_end_at_32768_tokens_take_no_more_than_each_token_once():
    calls, total, seen = 50, 32_768, list[int]()
    turns: list[Said] = []
    for turn in range(calls):
        seen += [turn] * (total // calls // 2)
        completion = [turn + 100] * (total // calls // 2)
        turns.append(Said(list(seen), completion, [-0.5] * len(completion)))
        seen += completion
    assert len(decompress(pack_tokens(recorded(turns)))) <= 1.3 * (4 + 4) * total
