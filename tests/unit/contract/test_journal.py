"""Journals as bytes: what was recorded comes back, and equal requests have equal digests."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from pipeline.contract.errors import MalformedMessage
from pipeline.contract.journal import (
    RecordedCall,
    RecordedTokens,
    digest_of_request,
    pack_calls,
    read_calls,
)
from pipeline.redaction import Redactor

ASKED = [{"role": "user", "content": "2 + 2?"}]


def call(number: int, *, attempt_no: int = 1, text: str = "4", **fields: Any) -> RecordedCall:
    return RecordedCall((attempt_no, number), f"{number:032x}", {"text": text}, **fields)


def ids(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def test_what_was_recorded_is_read_in_order() -> None:
    first = [call(0), call(1, text="five \ud800")]
    second = [call(2)]
    assert read_calls([pack_calls(first), pack_calls(second)]) == [*first, *second]


def test_a_prompt_that_continues_a_call_of_another_attempt_is_read_whole() -> None:
    logprobs = array("f", [-0.5]).tobytes()
    begun = call(0, tokens=RecordedTokens(ids(1, 2), ids(3), logprobs))
    continued = call(
        1, attempt_no=2, tokens=RecordedTokens(ids(9), ids(4, 5), None, (1, 0), len(ids(1, 2, 3)))
    )
    first, second = read_calls([pack_calls([begun]), pack_calls([continued])])
    assert first.tokens == RecordedTokens(ids(1, 2), ids(3), logprobs)
    assert second.tokens == RecordedTokens(ids(1, 2, 3, 9), ids(4, 5), None)


def test_a_call_whose_beginning_is_missing_is_left_out() -> None:
    lost = call(0, tokens=RecordedTokens(ids(1), ids(2)))
    prefix = RecordedTokens(ids(3), ids(4), None, lost.key, len(ids(1, 2)))
    assert read_calls([pack_calls([call(1, tokens=prefix), call(2)])]) == [call(2)]


def test_an_answer_with_a_secret_is_not_recorded() -> None:
    redact = Redactor(["hunter2-secret"]).data
    body = pack_calls([call(0), call(1, text="the key is hunter2-secret")], redact=redact)
    assert read_calls([body]) == [call(0)]
    assert pack_calls([call(1, text="hunter2-secret")], redact=redact) == b""


def test_an_answer_that_is_no_json_is_not_recorded() -> None:
    bad = RecordedCall((1, 1), "0" * 32, {"metadata": {"client": object()}})
    assert read_calls([pack_calls([call(0), bad])]) == [call(0)]


@pytest.mark.parametrize("change", [lambda b: b[:-3], lambda b: b"x" + b, lambda b: b"", bytes])
def test_damaged_bodies_are_malformed(change: Any) -> None:
    body = change(pack_calls([call(0, tokens=RecordedTokens(ids(1), ids(2)))]))
    if change is bytes:
        assert len(read_calls([body])) == 1
        return
    with pytest.raises(MalformedMessage):
        read_calls([body])


def test_the_order_of_keys_and_the_operators_tag_do_not_count() -> None:
    digest = digest_of_request(ASKED, {"model": "m", "temperature": 0.5})
    turned = [{"content": "2 + 2?", "role": "user"}]
    assert digest_of_request(turned, {"temperature": 0.5, "user": "g1-r0", "model": "m"}) == digest
    assert digest_of_request(ASKED, {"temperature": 0.5, "model": "m", "stop": None}) == digest


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "user", "content": "2 + 3?"}], {"model": "m"}),
        ([*ASKED, {"role": "assistant", "content": "4"}], {"model": "m"}),
        (ASKED, {"model": "other"}),
        (ASKED, {"model": "m", "temperature": 0.1}),
        (ASKED, {"model": "m", "tools": [{"type": "function"}]}),
        (ASKED, {"model": "m", "seed": 1}),
    ],
)
def test_every_difference_counts(messages: Any, options: Any) -> None:
    assert digest_of_request(messages, options) != digest_of_request(ASKED, {"model": "m"})


def test_a_request_that_is_no_json_has_no_digest() -> None:
    assert digest_of_request(ASKED, {"model": object()}) is None
    assert digest_of_request([{"content": "\ud800", "n": 2**70}], {}) is not None
