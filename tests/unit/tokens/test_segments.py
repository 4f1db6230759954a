"""Calls become segments by exact prefixes; every sampled token is trained once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fixtures.sampled_calls import sampled, without_ids
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tokens.segments import Segment, is_trained, merge_calls
from pipeline.tokens.token_body import SampledCall

P = [1, 2, 3]  #: a prompt


def shown(segment: Segment) -> tuple[list[int], list[int]]:
    """Return all tokens, and those that are trained."""
    return segment.token_ids.tolist(), segment.token_ids[segment.loss_mask == 1].tolist()


def only(*calls: SampledCall, **options: Any) -> Segment:
    (segment,) = merge_calls(calls, **options).segments
    return segment


def test_calls_that_continue_each_other_are_one_segment():
    segment = only(sampled(0, P, [10, 11], version=4), sampled(1, [*P, 10, 11, 5], [12], version=5))
    assert shown(segment) == ([*P, 10, 11, 5, 12], [10, 11, 12])
    assert segment.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert segment.logprobs.tolist() == [0, 0, 0, -10 / 1024, -11 / 1024, 0, -12 / 1024]
    assert segment.versions.tolist() == [-1, -1, -1, 4, 4, -1, 5]
    assert (segment.origin, segment.calls, segment.prompt_length) == ("start", (0, 1), 3)


def test_an_answer_that_was_tokenised_again_begins_a_segment_that_is_flagged_as_drift():
    merged = merge_calls([sampled(0, P, [10, 11]), sampled(1, [*P, 10, 99, 5], [12])])
    first, second = merged.segments
    assert shown(first) == ([*P, 10, 11], [10, 11])
    assert shown(second) == ([*P, 10, 99, 5, 12], [12])
    assert (first.origin, second.origin) == ("start", "drift")


def test_a_compacted_context_begins_a_segment_that_is_flagged_as_rewrite():
    long = [*P, 10, *range(20, 40)]
    calls = [sampled(0, P, [10]), sampled(1, long, [11]), sampled(2, [1, 2, 50, 51], [12])]
    first, second = merge_calls(calls).segments
    assert shown(first) == ([*long, 11], [10, 11])
    assert shown(second) == ([1, 2, 50, 51, 12], [12])
    assert second.origin == "rewrite"


def test_a_compacted_context_shorter_than_the_first_prompt_leaves_that_one_the_start():
    first, second = merge_calls([sampled(0, P, [10]), sampled(1, [1], [11])]).segments
    assert (first.calls, first.origin) == ((0,), "start")
    # Its prompt is a part of the first one: nothing was rewritten in it.
    assert (second.calls, second.origin) == ((1,), "start")
    (_, other) = merge_calls([sampled(0, P, [10]), sampled(1, [1, 9], [11])]).segments
    assert other.origin == "rewrite"


def test_thinking_that_the_next_prompt_leaves_out_begins_a_new_segment():
    think, answer = [70, 71, 72], [10]
    calls = [
        sampled(0, P, [*think, *answer]),
        sampled(1, [*P, *answer, 5], [*think, 11]),
        sampled(2, [*P, *answer, 5, 11, 6], [12]),
    ]
    segments = merge_calls(calls).segments
    assert [segment.origin for segment in segments] == ["start", "rewrite", "rewrite"]
    assert sum(int(segment.loss_mask.sum()) for segment in segments) == 4 + 4 + 1


def test_parallel_calls_branch_and_the_shared_tokens_are_trained_once():
    root = sampled(0, P, [10])
    left = sampled(1, [*P, 10, 5], [11])
    right = sampled(2, [*P, 10, 6], [12])
    deeper = sampled(3, [*P, 10, 6, 12, 7], [13])
    first, second = merge_calls([root, left, right, deeper]).segments
    assert shown(first) == ([*P, 10, 5, 11], [10, 11])
    assert shown(second) == ([*P, 10, 6, 12, 7, 13], [12, 13])
    assert (second.origin, second.calls) == ("branch", (2, 3))


def test_one_prompt_sampled_several_times_gives_a_segment_each():
    merged = merge_calls([sampled(number, P, [10 + number]) for number in range(3)])
    assert [shown(segment)[1] for segment in merged.segments] == [[10], [11], [12]]
    assert {segment.origin for segment in merged.segments} == {"start"}


def test_two_equal_samples_are_both_trained_and_continued_one_by_one():
    calls = [
        sampled(0, P, [10]),
        sampled(1, P, [10]),
        sampled(2, [*P, 10, 5], [11]),
        sampled(3, [*P, 10, 6], [12]),
    ]
    merged = merge_calls(calls)
    assert sorted(shown(segment)[1] for segment in merged.segments) == [[10, 11], [10, 12]]


def test_sub_agents_have_segments_of_their_own_also_with_a_common_prompt():
    calls = [
        sampled(0, P, [10]),
        sampled(1, [*P, 10, 5], [20], agent="critic"),
        sampled(2, [*P, 10, 5, 20, 6], [21], agent="critic"),
        sampled(3, [*P, 10, 7], [11]),
    ]
    main, critic = merge_calls(calls).segments
    assert shown(main) == ([*P, 10, 7, 11], [10, 11])
    assert shown(critic) == ([*P, 10, 5, 20, 6, 21], [20, 21])
    assert (critic.agent, critic.origin) == ("critic", "start")


def test_a_call_recorded_twice_is_trained_once():
    first = sampled(0, P, [10])
    again = sampled(0, P, [10], replayed=True)
    assert shown(only(first, again)) == ([*P, 10], [10])


def test_a_truncated_completion_that_is_continued_stays_in_its_segment():
    calls = [
        sampled(0, P, [10, 11], finish_reason="length"),
        sampled(1, [*P, 10, 11, 5], [12], finish_reason="stop"),
    ]
    segment = only(*calls)
    assert (shown(segment)[1], segment.truncated) == ([10, 11, 12], True)
    masked = only(*calls, truncated="mask_turn")
    assert shown(masked) == ([*P, 10, 11, 5, 12], [12])
    assert (masked.truncated, masked.calls) == (True, (1,))
    assert masked.logprobs[3] == masked.logprobs[4] == 0
    dropped = merge_calls(calls, truncated="drop")
    assert (dropped.segments, dropped.dropped) == ((), 1)


def test_a_segment_of_masked_turns_only_is_left_out():
    merged = merge_calls([sampled(0, P, [10], finish_reason="length")], truncated="mask_turn")
    assert (merged.segments, merged.dropped) == ((), 1)


def test_a_judges_completion_is_context_and_not_trained():
    calls = [
        sampled(0, P, [10]),
        sampled(1, [*P, 10, 5], [20], trainable=False),
        sampled(2, [*P, 10, 5, 20, 6], [11]),
    ]
    merged = merge_calls(calls)
    assert shown(merged.segments[0]) == ([*P, 10, 5, 20, 6, 11], [10, 11])
    assert (merged.untrained, merged.missing) == (1, 0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_aborted_and_empty_calls_are_counted_and_not_trained(reason):
    calls = [sampled(0, P, [10], finish_reason=reason), sampled(1, P, []), sampled(2, P, [11])]
    merged = merge_calls(calls)
    assert [shown(segment)[1] for segment in merged.segments] == [[11]]
    assert merged.untrained == 2


def test_calls_without_ids_are_counted():
    merged = merge_calls([without_ids(0, trainable=False), sampled(1, P, [10])])
    assert (len(merged.segments), merged.missing, merged.untrained) == (1, 1, 0)


def test_an_end_token_that_the_server_left_out_is_context():
    end = 99
    segment = only(sampled(0, P, [10]), sampled(1, [*P, 10, end, 5], [11, end]))
    assert shown(segment) == ([*P, 10, end, 5, 11, end], [10, 11, end])


def test_weights_that_were_updated_inside_a_call_count_as_the_older_ones():
    call = sampled(0, P, [10, 11], version=8, version_before=7)
    assert only(call).versions.tolist() == [-1, -1, -1, 7, 7]


def test_a_changed_tool_schema_begins_a_new_segment():
    calls = [sampled(0, [60, *P], [10]), sampled(1, [61, *P, 10, 5], [11])]
    assert [segment.origin for segment in merge_calls(calls).segments] == ["start", "rewrite"]


def test_a_prompt_that_was_too_long_leaves_the_segment_before_it_alone():
    """Such a call fails, so it is no call; the agent then goes on with a shorter prompt."""
    calls = [sampled(0, P, [10]), sampled(2, [*P[:2], 5], [11])]
    assert [shown(segment)[1] for segment in merge_calls(calls).segments] == [[10], [11]]


def test_a_logprob_that_the_server_did_not_give_is_not_a_number():
    unknown = only(sampled(0, P, [10, 11], [-9999.0, -1.0])).logprobs
    assert np.isnan(unknown[3])
    assert unknown[4] == -1
    bare = SampledCall(0, np.array(P, np.int32), np.array([10], np.int32))
    assert np.isnan(only(bare).logprobs).tolist() == [False, False, False, True]


def test_a_sampled_token_may_have_logprob_zero():
    segment = only(sampled(0, P, [10], [0.0]))
    assert (segment.logprobs.tolist(), int(segment.loss_mask.sum())) == ([0] * 4, 1)


def test_no_calls_give_no_segments():
    assert merge_calls([]).segments == ()


@st.composite
def forests(draw: Any) -> list[SampledCall]:
    """Calls that continue, branch from, rewrite or repeat each other, with few distinct tokens."""
    ids = st.lists(st.integers(0, 2), max_size=4)
    calls: list[SampledCall] = []
    for sequence in range(draw(st.integers(0, 9))):
        known = [[*c.prompt.tolist(), *c.completion.tolist()] for c in calls]  # type: ignore[union-attr]
        start = draw(st.sampled_from(known)) if known else []
        if draw(st.integers(0, 3)) == 0:
            start = start[: draw(st.integers(0, len(start)))]
        calls.append(
            sampled(
                sequence,
                start + draw(ids),
                draw(ids),
                version=draw(st.integers(-1, 3)),
                agent=draw(st.sampled_from(["", "", "critic"])),
                trainable=draw(st.integers(0, 5)) > 0,
                finish_reason=draw(st.sampled_from(["stop", "stop", "length", "abort"])),
            )
        )
    return calls


@given(forests(), st.integers(), st.lists(st.integers(0, 8), max_size=3))
def test_every_sampled_token_is_trained_once_whatever_the_order_of_the_calls(calls, seed, twice):
    merged = merge_calls(calls)
    trained = [call for call in calls if is_trained(call)]
    for segment in merged.segments:
        size = len(segment.token_ids)
        assert len(segment.loss_mask) == len(segment.logprobs) == len(segment.versions) == size
        assert set(segment.loss_mask.tolist()) <= {0, 1}
        assert not segment.logprobs[segment.loss_mask == 0].any()
        assert (segment.versions[segment.loss_mask == 0] == -1).all()
        assert segment.loss_mask[: segment.prompt_length].sum() == 0
    # Each trained call is in one segment, at the position at which the server sampled it.
    place = {number: segment for segment in merged.segments for number in segment.calls}
    counted = Counter(number for segment in merged.segments for number in segment.calls)
    assert counted == Counter(call.sequence for call in trained)
    total = 0
    for call in trained:
        assert call.prompt is not None
        assert call.completion is not None
        assert call.logprobs is not None
        segment, start = place[call.sequence], len(call.prompt)
        part = slice(start, start + len(call.completion))
        assert segment.agent == call.agent
        assert segment.token_ids[:start].tolist() == call.prompt.tolist()
        assert segment.token_ids[part].tolist() == call.completion.tolist()
        assert segment.logprobs[part].tolist() == call.logprobs.tolist()
        assert set(segment.versions[part].tolist()) == {call.version}
        assert segment.loss_mask[part].all()
        total += len(call.completion)
    assert sum(int(segment.loss_mask.sum()) for segment in merged.segments) == total
    assert len(calls) == len(trained) + merged.untrained + merged.missing

    repeated = [*calls, *(calls[number] for number in twice if number < len(calls))]
    random.Random(seed).shuffle(repeated)
    again = merge_calls(repeated)
    assert list(map(described, again.segments)) == list(map(described, merged.segments))
    assert (again.untrained, again.missing) == (merged.untrained, merged.missing)


def described(segment: Segment) -> tuple[Any, ...]:
    arrays = (segment.token_ids, segment.loss_mask, segment.logprobs, segment.versions)
    lists = tuple(array.tolist() for array in arrays)
    return (*lists, segment.calls, segment.agent, segment.origin, segment.truncated)


@given(forests())
def test_masked_turns_and_dropped_segments_train_no_truncated_completion(calls):
    length = {call.sequence for call in calls if call.finish_reason == "length"}
    masked = merge_calls(calls, truncated="mask_turn")
    assert not {number for segment in masked.segments for number in segment.calls} & length
    dropped = merge_calls(calls, truncated="drop")
    assert not any(segment.truncated for segment in dropped.segments)
