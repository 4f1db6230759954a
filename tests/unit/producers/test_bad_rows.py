"""Rules of refusing dataset rows: each names file and line, and costs its neighbours nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.contract.errors import InputError
from producers.datasets import read_prompts
from producers.rows import BadRow, Unstorable, storable

GOOD = b'{"prompt": "good"}\n'

CASES = {
    "malformed": (b'{"prompt": "a",}', "E114", r"column 15: Illegal|column 16: Expecting"),
    "cut_off": (b'{"prompt": "a', "E114", "malformed JSON at column 12: Unterminated"),
    "array": (b'["a"]', "E114", "an array, not a JSON object"),
    "text": (b'"a"', "E114", "a string, not"),
    "null": (b"null", "E114", "null, not"),
    "number": (b"17", "E114", "a number, not"),
    "pretty_printed": (b"{", "E114", "malformed JSON at column"),
    "nested_too_deeply": (b'{"prompt": ' + b"[" * 200_000, "E114", "nested too deeply"),
    "endless_number": (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "E114", "digits"),
    "key_given_twice": (b'{"prompt": "a", "prompt": "b"}', "E114", 'key "prompt" is given twice'),
    "raw_control_character": (b'{"prompt": "a\x01"}', "E114", "Invalid control character"),
    "no_prompt": (b'{"a": 1, "b": 2}', "E115", "no prompt field .* the row has: a, b"),
    "no_fields": (b"{}", "E115", "the row has: nothing"),
    "prompt_number": (b'{"prompt": 5}', "E115", "`prompt` holds a int, not text or chat"),
    "prompt_object": (b'{"prompt": {"a": 1}}', "E115", "holds an object, not text"),
    "prompt_blank": (b'{"prompt": "  "}', "E115", "`prompt` is empty"),
    "prompt_no_messages": (b'{"messages": []}', "E115", "holds no messages"),
    "prompt_list": (b'{"messages": [{"role": "user"}, "b"]}', "E115", "item 1 is no chat message"),
    "latin_1": ('{"prompt": "é"}'.encode("latin-1"), "E118", "byte 0xe9 at byte 31 of the file"),
    "nul": (b'{"prompt": "a\\u0000b"}', "E119", "`prompt` holds a NUL character"),
    "nul_in_key": (b'{"prompt": "a", "x\\u0000": 1}', "E119", r"`x\\x00` holds a NUL"),
    "surrogate": (b'{"prompt": "a", "m": {"x": ["\\ud83d"]}}', "E119", r"`m.x\[0\]` .*\\ud83d"),
    "infinity": (b'{"prompt": "a", "x": Infinity}', "E119", "`x` holds an infinite"),
    "overflow": (b'{"prompt": "a", "x": -1e999}', "E119", "`x` holds an infinite"),
    "huge_integer": (b'{"prompt": "a", "x": 99999999999999999999}', "E119", "beyond 64 bits"),
}


def read_with_bad(path, **options) -> tuple[list[int], list[BadRow]]:
    bad: list[BadRow] = []
    return [p.row_no for p in read_prompts(path, on_bad=bad.append, **options)], bad


@pytest.mark.parametrize("case", CASES)
def test_a_bad_row_names_its_place_and_costs_its_neighbours_nothing(tmp_path, case):
    line, code, reason = CASES[case]
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + line + b"\n" + GOOD)

    rows, bad = read_with_bad(file)

    assert rows == [0, 2]
    assert [(each.row_no, each.location, each.code) for each in bad] == [(1, f"{file}:2", code)]
    with pytest.raises(InputError, match=f"a.jsonl:2: .*{reason}"):
        list(read_prompts(file))
    assert bad[0].error().exit_code == 2
    assert bad[0].raw.isprintable()
    assert len(bad[0].raw) <= 2500


def test_without_a_place_for_bad_rows_the_first_one_ends_reading(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"oops\n" + GOOD + b"oops\n")
    prompts = read_prompts(file)
    assert next(prompts).row_no == 0
    with pytest.raises(InputError, match=r":2: malformed JSON at column 1.*--skip-bad"):
        next(prompts)


def test_a_named_field_that_is_missing_lists_the_fields_and_the_nearest(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "a", "x": 1, "gold": null}\n')
    with pytest.raises(InputError, match=r"`qestion` is missing; .*question, x.*mean `question`"):
        list(read_prompts(file, prompt_field="qestion"))
    with pytest.raises(InputError, match=r"answer field `gold` is null.*--answer-field"):
        list(read_prompts(file, answer_field="gold"))


def test_an_id_given_twice_is_refused_the_second_time(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"id": "a"}, {"id": "b"}, {"id": "a"}, {"id": 1}, {"id": "1"}, {"id": 1}, {}, {}]
    file.write_text("".join(json.dumps(row | {"prompt": "x"}) + "\n" for row in rows))

    good, bad = read_with_bad(file)

    assert good == [0, 1, 3, 4, 6, 7]
    assert [(each.row_no, each.code) for each in bad] == [(2, "E116"), (5, "E116")]
    assert bad[0].reason == 'id "a" was given before'


def test_a_line_over_the_limit_is_refused_without_being_held(tmp_path):
    file = tmp_path / "a.jsonl"
    with file.open("wb") as out:
        out.write(GOOD + b'{"prompt": "')
        for _ in range(300):
            out.write(b"x" * 10_000)
        out.write(b'"}\n' + GOOD)

    rows, bad = read_with_bad(file, max_line_bytes=1000)

    assert rows == [0, 2]
    assert [(each.location, each.code) for each in bad] == [(f"{file}:2", "E117")]
    assert bad[0].reason == "the line is longer than 1,000 bytes"


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""])
def test_a_line_of_exactly_the_limit_passes_and_one_byte_more_does_not(tmp_path, ending):
    file = tmp_path / "a.jsonl"
    line = b'{"prompt": "aaaa"}'
    file.write_bytes(line + ending)
    assert read_with_bad(file, max_line_bytes=len(line))[0] == [0]
    assert read_with_bad(file, max_line_bytes=len(line) - 1)[1][0].code == "E117"


def test_utf_16_is_recognised(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n', encoding="utf-16")
    with pytest.raises(InputError, match=r"byte 0xff at byte 0 .*iconv -f UTF-16 -t UTF-8") as e:
        list(read_prompts(file))
    assert e.value.code == "E118"


def test_a_pretty_printed_document_is_told_apart_from_lines(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"prompt": "a"}], indent=1))
    with pytest.raises(InputError, match=r"one object a line: jq -c"):
        list(read_prompts(file))
    file.write_text(json.dumps([{"prompt": "a"}]))
    with pytest.raises(InputError, match=r"an array, not a JSON object. *Write one object a line"):
        list(read_prompts(file))


def test_nan_becomes_null(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "x": NaN}\n')
    assert [p.payload for p in read_prompts(file)] == [{"content": "a", "x": None}]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_what_is_storable_is_json_that_postgres_takes(value):
    try:
        kept = storable(value, max_chars=1000)
    except Unstorable:
        return
    text = json.dumps(kept, allow_nan=False, ensure_ascii=False)
    assert "\\u0000" not in text
    text.encode()
    assert json.loads(text) == kept


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_an_input_error(tmp_path_factory, junk):
    file = tmp_path_factory.mktemp("junk") / "a.jsonl"
    file.write_bytes(GOOD + junk + b"\n" + GOOD)
    rows, _ = read_with_bad(file)
    assert rows[0] == 0
    assert len(rows) >= 2
