"""The calls that gateways recorded become those of one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.contract.journal import CallKey, RecordedCall, pack_calls, read_calls
from pipeline.contract.model_call import ModelCall
from pipeline.tokens.prompt_prefixes import PromptPrefixes
from pipeline.tokens.recorded_calls import RemoteCalls, recorded_call, remote_calls_of
from pipeline.tokens.token_body import pack_tokens, unpack_tokens


class Gateway:
    """One gateway's record of an attempt."""

    def __init__(self) -> None:
        self._prefixes = PromptPrefixes()
        self._keys: dict[int, CallKey] = {}
        self.recorded: list[RecordedCall] = []

    def call(
        self,
        at: int,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        identity: str = "",
        supersedes: bool = False,
    ) -> None:
        sequence = len(self._keys)
        self._keys[sequence] = key = (1, at)
        tokens = self._prefixes.add(sequence, prompt, completion, [-0.5] * len(completion))
        call = ModelCall(sequence=sequence, trainable=True, policy_version=at, tokens=tokens)
        prefix = self._keys[tokens.prefix_call] if tokens.prefix_len else None
        marks = {"identity": identity or str(at), "supersedes": supersedes}
        self.recorded.append(recorded_call(call, key, prefix=prefix, **marks))


def together(*gateways: Gateway) -> RemoteCalls:
    """Pack each call in a frame of its own, and read all frames in order."""
    calls = sorted((c for g in gateways for c in g.recorded), key=lambda call: call.key)
    return remote_calls_of(read_calls(pack_calls([call]) for call in calls))


def sampled(calls: RemoteCalls) -> list[tuple[list[int], list[int]]]:
    found: list[Any] = unpack_tokens(pack_tokens(calls.calls))
    return [(call.prompt.tolist(), call.completion.tolist()) for call in found]


def test_calls_of_several_gateways_are_one_conversation_in_the_order_of_their_answers() -> None:
    one, two = Gateway(), Gateway()
    one.call(5, [1, 2], [3])
    two.call(7, [1, 2, 3, 4], [5])
    one.call(9, [1, 2, 3, 4, 5, 6], [7])
    found = together(one, two)
    assert [call.sequence for call in found.calls] == [0, 1, 2]
    assert [call.policy_version for call in found.calls] == [5, 7, 9]
    assert sampled(found) == [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7])]
    prefixes = [call.tokens.prefix_len for call in found.calls if call.tokens]
    assert prefixes == [0, 3, 5], "what another gateway has seen is stored once too"


def test_a_call_that_was_repeated_elsewhere_is_left_out_and_counted() -> None:
    one, two = Gateway(), Gateway()
    one.call(5, [1, 2], [3], identity="a")
    one.call(6, [1, 2, 3], [4], identity="b")
    two.call(7, [1, 2, 3], [9], identity="b", supersedes=True)
    two.call(8, [1, 2, 3, 9], [5])
    found = together(one, two)
    assert sampled(found) == [([1, 2], [3]), ([1, 2, 3], [9]), ([1, 2, 3, 9], [5])]
    assert found.unanswered == 1


def test_a_repetition_of_a_call_that_nobody_recorded_takes_nothing_away() -> None:
    one = Gateway()
    one.call(5, [1], [2], identity="a")
    one.call(6, [1], [3], identity="b", supersedes=True)
    found = together(one)
    assert (sampled(found), found.unanswered) == ([([1], [2]), ([1], [3])], 0)


def test_a_call_without_ids_stays_a_call() -> None:
    call = ModelCall(sequence=0, response={"role": "assistant", "content": "4"})
    recorded = recorded_call(call, (1, 5), prefix=None, identity="a", supersedes=False)
    (found,) = remote_calls_of(read_calls([pack_calls([recorded])])).calls
    assert found == call
