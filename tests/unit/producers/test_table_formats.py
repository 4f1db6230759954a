"""Rules of the other formats: Parquet files and Hugging Face datasets."""

from __future__ import annotations

import base64
import datetime
import decimal
import sys
import types
import uuid

import pytest

from pipeline.contract.errors import InputError
from producers.datasets import read_prompts
from producers.huggingface_rows import read_hub
from producers.rows import Unstorable, storable


class FakeLibrary:
    """Stands in for the package `datasets`."""

    def __init__(self, rows=(), error: Exception | None = None) -> None:
        self.rows = rows
        self.error = error
        self.asked: tuple = ()

    def load_dataset(self, name, config, *, split, streaming):
        self.asked = (name, config, split, streaming)
        if self.error:
            raise self.error
        return iter(self.rows)


def test_parquet_rows_keep_their_order_and_types(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    parquet = pytest.importorskip("pyarrow.parquet")
    day = datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    rows = [
        {"question": f"q{n}", "answer": str(n), "at": day, "blob": b"\x00\xff", "score": n / 2}
        for n in range(700)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)

    prompts = list(read_prompts(tmp_path / "a.parquet"))

    assert [p.row_no for p in prompts] == list(range(700))
    assert prompts[699].payload == {
        "content": "q699",
        "answer": "699",
        "at": "2025-01-02T03:04:05+00:00",
        "blob": base64.b64encode(b"\x00\xff").decode(),
        "score": 349.5,
    }


def test_a_bad_parquet_row_is_named_and_skipped(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"prompt": ["a", None, "b\0", "c", "d" * 50], "x": [1.0, 2, 3, None, 5]})
    parquet.write_table(table, tmp_path / "a.parquet")
    bad = []

    prompts = list(read_prompts(tmp_path / "a.parquet", on_bad=bad.append, max_line_bytes=40))

    assert [p.row_no for p in prompts] == [0, 3]
    assert [(b.row_no, b.code) for b in bad] == [(1, "E115"), (2, "E119"), (4, "E119")]
    assert bad[0].location == f"{tmp_path / 'a.parquet'} row 2"


def test_a_file_that_only_says_parquet_is_an_error(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no it is not")
    with pytest.raises(InputError, match="cannot be read as Parquet") as caught:
        list(read_prompts(tmp_path / "a.parquet"))
    assert caught.value.code == "E111"


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [("pyarrow", "a.parquet", "parquet"), ("datasets", "hf:x/y", "datasets")],
)
def test_a_missing_extra_names_the_command_that_installs_it(
    tmp_path, monkeypatch, module, source, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.parquet", raising=False)
    if source.startswith("a."):
        (tmp_path / source).write_bytes(b"PAR1")
        source = str(tmp_path / source)
    with pytest.raises(InputError, match=rf"rollout-pipeline\[{extra}\]") as caught:
        list(read_prompts(source))
    assert caught.value.code == "E112"


def test_a_hub_name_is_split_into_name_configuration_and_split():
    library = FakeLibrary([{"question": "a"}, {"question": "b"}])
    rows = list(read_hub("hf:openai/gsm8k:main", "test", library=library))
    assert library.asked == ("openai/gsm8k", "main", "test", True)
    assert [(row.row_no, row.columns) for row in rows] == [
        (0, {"question": "a"}),
        (1, {"question": "b"}),
    ]
    assert rows[1].location == "hf:openai/gsm8k:main row 2"
    list(read_hub("hf:openai/gsm8k", "train", library=library))
    assert library.asked == ("openai/gsm8k", None, "train", True)


@pytest.mark.parametrize("error", [FileNotFoundError("no such"), ValueError("bad split")])
def test_a_hub_error_names_the_dataset(error):
    with pytest.raises(InputError, match=rf"hf:x/y cannot be loaded.*{error}") as caught:
        list(read_hub("hf:x/y", "train", library=FakeLibrary(error=error)))
    assert caught.value.code == "E111"


def test_a_dataset_saved_to_disk_is_read_by_split(tmp_path, monkeypatch):
    saved = {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}, {"prompt": "c"}]}
    (tmp_path / "dataset_dict.json").write_text("{}")
    library = types.SimpleNamespace(load_from_disk=lambda path: saved)
    monkeypatch.setitem(sys.modules, "datasets", library)

    prompts = list(read_prompts(tmp_path, split="test"))

    assert [p.payload["content"] for p in prompts] == ["b", "c"]
    with pytest.raises(InputError, match=r"no split `val`.*test, train"):
        list(read_prompts(tmp_path, split="val"))


def test_the_real_library_reads_what_it_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    rows = datasets.Dataset.from_list([{"question": f"q{n}", "answer": str(n)} for n in range(5)])
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    rows.to_parquet(str(tmp_path / "files" / "train.parquet"))

    wanted = [{"content": f"q{n}", "answer": str(n)} for n in range(5)]
    assert [p.payload for p in read_prompts(tmp_path / "saved")] == wanted
    streamed = read_prompts(f"hf:{tmp_path / 'files'}")
    assert [p.payload for p in streamed] == wanted
    with pytest.raises(InputError, match="cannot be loaded"):
        list(read_prompts("hf:no/such-dataset"))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (datetime.date(2025, 1, 2), "2025-01-02"),
        (datetime.timedelta(seconds=90), 90.0),
        (decimal.Decimal("1.50"), 1.5),
        (decimal.Decimal("7"), 7),
        (decimal.Decimal("0.1234567890123456789"), "0.1234567890123456789"),
        (decimal.Decimal("NaN"), None),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        ((1, (2,)), [1, [2]]),
        ({1: "a"}, {"1": "a"}),
        (float("nan"), None),
    ],
)
def test_values_that_json_lacks_become_the_nearest_it_has(value, kept):
    assert storable({"x": value}, max_chars=100) == {"x": kept}


def test_values_without_a_json_form_are_refused_by_field():
    with pytest.raises(Unstorable, match=r"`a\[1\]` holds a object"):
        storable({"a": [1, object()]}, max_chars=100)


def test_arrays_become_lists():
    numpy = pytest.importorskip("numpy")
    value = {"a": numpy.arange(3), "b": numpy.float32(0.5), "c": numpy.array([[1.5, float("nan")]])}
    assert storable(value, max_chars=9) == {"a": [0, 1, 2], "b": 0.5, "c": [[1.5, None]]}
