"""Rules of turning dataset rows into prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.errors import InputError
from producers.datasets import Prompt, read_prompts

GSM8K = Path(__file__).parents[3] / "../shared/data/gsm8k/test.jsonl"


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def payloads(path: Path, **options: Any) -> list[dict]:
    return [prompt.payload for prompt in read_prompts(path, **options)]


def test_a_row_becomes_content_answer_and_its_other_columns(tmp_path):
    file = write_rows(
        tmp_path / "a.jsonl", {"question": "2+2?", "answer": "4", "level": 1, "tags": ["x", None]}
    )
    assert list(read_prompts(file)) == [
        Prompt(0, {"content": "2+2?", "answer": "4", "level": 1, "tags": ["x", None]})
    ]


@pytest.mark.parametrize(
    "field", ["prompt", "question", "input", "problem", "content", "instruction"]
)
def test_the_usual_prompt_fields_are_found(tmp_path, field):
    assert payloads(write_rows(tmp_path / "a.jsonl", {"x": 1, field: "hi"})) == [
        {"content": "hi", "x": 1}
    ]


@pytest.mark.parametrize("field", ["answer", "solution", "target", "gold", "label", "output"])
def test_the_usual_answer_fields_are_found(tmp_path, field):
    assert payloads(write_rows(tmp_path / "a.jsonl", {"prompt": "hi", field: 7})) == [
        {"content": "hi", "answer": 7}
    ]


def test_a_null_default_field_gives_way_to_the_next_one(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", {"prompt": None, "question": "hi"})
    assert payloads(file) == [{"content": "hi", "prompt": None}]


def test_a_prompt_of_chat_messages_stays_messages(tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file = write_rows(tmp_path / "a.jsonl", {"messages": chat, "answer": "x"}, {"prompt": chat})
    assert payloads(file) == [{"messages": chat, "answer": "x"}, {"messages": chat}]


def test_named_fields_win_over_the_defaults_and_hide_no_column(tmp_path):
    row = {"prompt": "p", "task": "t", "answer": "a", "solution": "s", "content": "c"}
    file = write_rows(tmp_path / "a.jsonl", row)
    assert payloads(file, prompt_field="task", answer_field="solution") == [
        {
            "content": "t",
            "answer": "s",
            "prompt": "p",
            "original_answer": "a",
            "original_content": "c",
        }
    ]


def test_row_numbers_are_line_numbers_less_one_whatever_is_skipped(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n\n   \nnot json\n{"prompt": "b"}\r\n{"prompt": "c"}')
    bad = []
    assert [p.row_no for p in read_prompts(file, on_bad=bad.append)] == [0, 4, 5]
    assert [each.row_no for each in bad] == [3]


def test_limit_counts_good_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\nnot json\n{"prompt": "b"}\n{"prompt": "c"}\n')
    assert [p.row_no for p in read_prompts(file, limit=2, on_bad=lambda _: None)] == [0, 2]
    assert list(read_prompts(file, limit=0)) == []


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\n')
    assert payloads(file) == [{"content": "a"}]


def test_line_separators_inside_a_text_do_not_end_the_row(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert payloads(file) == [{"content": "a\u2028b\x85c"}]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.gz"])
def test_gzipped_files_are_read_as_they_are(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    assert [p["content"] for p in payloads(file)] == ["a", "b"]


def test_reading_the_same_file_twice_gives_the_same_prompts(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", *({"id": n, "prompt": f"p{n}"} for n in range(50)))
    assert list(read_prompts(file)) == list(read_prompts(str(file)))


def test_unicode_survives_unchanged(tmp_path):
    text = "naïve 漢字 🙂 \u202e ﷽"
    assert payloads(write_rows(tmp_path / "a.jsonl", {"prompt": text})) == [{"content": text}]


@pytest.mark.skipif(not GSM8K.exists(), reason="the shared GSM8K file is not beside this checkout")
def test_gsm8k_reads_whole_with_nothing_configured():
    prompts = list(read_prompts(GSM8K))
    assert len(prompts) == 1319
    assert [p.row_no for p in prompts] == list(range(1319))
    assert all(set(p.payload) == {"content", "answer"} for p in prompts)
    assert all("####" in p.payload["answer"] for p in prompts)


def test_a_missing_file_is_an_error_at_once_and_names_the_nearest(tmp_path):
    write_rows(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(InputError, match=r"No dataset at .*tran\.jsonl.*Did you mean .*train") as e:
        read_prompts(tmp_path / "tran.jsonl")
    assert e.value.code == "E111"
    assert e.value.exit_code == 2
    with pytest.raises(InputError, match="no directory"):
        read_prompts(tmp_path / "nowhere" / "a.jsonl")


def test_a_directory_is_refused_and_its_datasets_are_named(tmp_path):
    write_rows(tmp_path / "train.jsonl", {"prompt": "a"})
    with pytest.raises(InputError, match=r"is a directory.*train\.jsonl"):
        read_prompts(tmp_path)


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(InputError, match=r"a\.csv has no format.*\.jsonl.*\.parquet"):
        read_prompts(tmp_path / "a.csv")


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match="has no rows") as caught:
        list(read_prompts(file, on_bad=lambda _: None))
    assert caught.value.code == "E113"


def test_a_damaged_archive_says_how_far_reading_got(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    rows = b"".join(b'{"prompt": "%d"}\n' % n for n in range(2000))
    file.write_bytes(gzip.compress(rows)[:-2000])
    with pytest.raises(InputError, match=r"cannot be read.*after line \d+") as caught:
        list(read_prompts(file))
    assert caught.value.code == "E111"
    file.write_bytes(b"no gzip at all")
    with pytest.raises(InputError, match="cannot be read"):
        list(read_prompts(file))
