"""Answers parsed with known prompts are those that a whole parse gives, whatever a server sends."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.llm.json_text import JsonError, parse_json
from workers.llm.known_prompts import KnownPrompts, parse_answer

FIELD = "prompt_token_ids"
#: Texts that contain what the reader looks for, or what it puts in its place.
HOSTILE = (
    '"prompt_token_ids":[1,2]',
    '{"prompt_token_ids":[1,2],"choices":[]}',
    '\\"prompt_token_ids\\":[',
    "],[[,",
    "\ud800",
)
ids = st.lists(st.integers(0, 99_999), max_size=6)
odd_items = st.sampled_from([True, False, None, 1.0, 1e5, "7", "]", [], [3], {}, -1, 2**31, 2**40])
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=8))
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :"), (",\n", ":\t")])


@st.composite
def answers(draw: st.DrawFn, prompt: list[Any]) -> bytes:
    """An answer with this prompt at one of its places, as some server might write it."""
    items = [*prompt, draw(odd_items)] if draw(st.integers(0, 4)) == 0 else prompt
    message = {"content": draw(texts), FIELD: draw(ids)} if draw(st.booleans()) else {}
    choice = {"message": message, "finish_reason": draw(texts)}
    body: dict[str, Any] = {"id": draw(texts), draw(texts): draw(ids), "choices": [choice]}
    holders = st.sampled_from([[body], [choice], [body, choice], [message], []])
    for holder in draw(holders):
        holder[FIELD] = items
    shuffled = dict(draw(st.permutations(list(body.items()))))
    data = json.dumps(shuffled, separators=draw(separators)).encode()
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=1)):
        data = change(data)
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(data)))
        data = (
            data[:at]
            + draw(st.sampled_from([b"", b"]", b"[", b",", b'"', b"0", b" "]))
            + (data[at + draw(st.integers(0, 1)) :])
        )
    return data


def _renamed(data: bytes) -> bytes:
    return data.replace(b"prompt_token", b"prompt\\u005ftoken", 1)


def _doubled(data: bytes) -> bytes:
    return data[:-1] + b',"prompt_token_ids":[5,6]}'


def _longer_name(data: bytes) -> bytes:
    return data.replace(b'"prompt_token_ids"', b'"x\\"prompt_token_ids"', 1)


def _cut(data: bytes) -> bytes:
    return data[: -len(data) // 3]


CHANGES = (_renamed, _doubled, _longer_name, _cut)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Answers whose prompts go on, go back, or differ in the middle; of two conversations."""
    prompts: list[list[int]] = [draw(ids), draw(ids)]
    found: list[bytes] = []
    for _ in range(draw(st.integers(1, 6))):
        which = draw(st.integers(0, 1))
        before = prompts[which]
        kept = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        prompts[which] = kept + draw(ids)
        found.append(draw(answers(prompts[which])))
    return found


def shown(parse: Callable[[bytes], Any], data: bytes) -> str:
    """The value with the types of its parts, because 1 == 1.0 == True; or that it is no JSON."""
    try:
        return repr(_with_lists(parse(data)))
    except JsonError:
        return "no JSON"


def _with_lists(value: Any) -> Any:
    if isinstance(value, array):
        return list(value)
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=400, deadline=None)
@given(conversations())
def test_a_parse_with_known_prompts_gives_what_a_whole_parse_gives(found: list[bytes]) -> None:
    known = KnownPrompts()
    for data in found:
        got = shown(lambda data: known.parse(data) or parse_json(data), data)
        assert got == shown(parse_json, data)


def answer(prompt: list[Any], *, of_choice: bool = False, spaces: bool = False) -> bytes:
    choice: dict[str, Any] = {"message": {"content": HOSTILE[0]}}
    body: dict[str, Any] = {"choices": [choice]}
    (choice if of_choice else body)[FIELD] = prompt
    return json.dumps(body, separators=(", ", ": ") if spaces else (",", ":")).encode()


def ids_of(body: Any) -> Any:
    return body.get(FIELD, body["choices"][0].get(FIELD))


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("of_choice", [False, True])
def test_a_conversation_that_goes_on_is_known_once(of_choice: bool, spaces: bool) -> None:
    known = KnownPrompts()
    prompt: list[int] = []
    for more in ([1, 12], [123], [], [4] * 9):
        prompt += more
        body = known.parse(answer(prompt, of_choice=of_choice, spaces=spaces))
        assert ids_of(body) == array("I", prompt)
    assert len(known._kept) == 1


@pytest.mark.parametrize("changed", [[1, 123], [1, 1], [1], [2, 12], [12]])
def test_another_prompt_is_not_taken_for_a_known_one(changed: list[int]) -> None:
    known = KnownPrompts()
    known.parse(answer([1, 12]))
    assert ids_of(known.parse(answer(changed))) == array("I", changed)
    assert ids_of(known.parse(answer([1, 12, 3]))) == array("I", [1, 12, 3])


@pytest.mark.parametrize(
    "ending", [",,3]", ",]", ", ]", " 3]", ",3,]", ",03]", ",-]", "", ",3", ",3}", "]]", ",[3]]"]
)
def test_a_list_that_goes_on_in_a_wrong_way_is_left_to_the_whole_parse(ending: str) -> None:
    known = KnownPrompts()
    known.parse(answer([1, 2]))
    assert known.parse(answer([1, 2]).replace(b"2]", b"2" + ending.encode())) is None


@pytest.mark.parametrize("top", ["", "0" * 32, [7], [], None])
def test_ids_at_another_place_of_the_answer_are_left_to_the_whole_parse(top: Any) -> None:
    body = {"choices": [{"message": {FIELD: [1, 2]}}, {FIELD: [1, 2]}], FIELD: top}
    data = json.dumps(body, separators=(",", ":")).encode()
    assert KnownPrompts().parse(data) is None
    del body[FIELD]
    assert KnownPrompts().parse(json.dumps(body, separators=(",", ":")).encode()) is None


@pytest.mark.parametrize("item", [True, None, 1.0, 1e5, "7", [7], -1, 2**31, 2**40])
@pytest.mark.parametrize("before", [[], [1, 2]])
def test_what_is_no_id_is_left_to_the_whole_parse(item: Any, before: list[int]) -> None:
    known = KnownPrompts()
    known.parse(answer([1, 2]))
    assert known.parse(answer([*before, item])) is None


def test_the_newest_conversations_of_an_attempt_are_kept() -> None:
    known = KnownPrompts()
    for start in range(9):
        known.parse(answer([start]))
        known.parse(answer([start, 5]))
    assert [list(each.ids) for each in known._kept] == [[n, 5] for n in (8, 7, 6, 5)]


def test_only_long_answers_of_an_attempt_have_their_ids_in_an_array() -> None:
    short, long = answer([1, 2]), answer(list(range(9000)))
    assert type(ids_of(parse_answer(long))) is list
    with KnownPrompts().in_use():
        assert type(ids_of(parse_answer(short))) is list
        assert ids_of(parse_answer(long)) == array("I", range(9000))
    assert type(ids_of(parse_answer(long))) is list
