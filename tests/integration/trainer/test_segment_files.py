"""Segments as files and tables: every token once, in its types, and nothing is leased."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fixtures.stored_run import StoredRun
from fixtures.token_runs import ONE, TWO, succeeded, token_run
from sqlalchemy import Engine

from pipeline.contract.train_batch import BatchSpec
from pipeline.queue.claim_checks import check_out
from pipeline.queue.payloads import FolderPayloads
from pipeline.trainer.adapters.segment_table import (
    SEGMENT_COLUMNS,
    segment_table,
    write_segments,
)
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.stored_groups import StoredGroups
from rollout.app import run_command

parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")

DOCS = Path(__file__).parents[3] / "docs" / "trainers.md"


def finished(engine: Engine) -> StoredRun:
    """Two groups of two rollouts: one of one segment, one of two."""
    return token_run(StoredRun(engine, prompts=2, n=2), ONE, TWO)


def test_each_segment_of_a_run_is_a_typed_row_of_the_file(engine: Engine, tmp_path: Path):
    story = finished(engine)
    report = write_segments(StoredGroups(engine, story.run), tmp_path / "a", run=story.run.slug)
    assert (report.rollouts, report.rows, report.rollouts_without_rows) == (4, 6, 0)
    table = parquet.read_table(tmp_path / "a")
    assert table.column_names == list(SEGMENT_COLUMNS)
    kinds = {str(table.schema.field(name).type) for name in ("token_ids", "versions")}
    assert kinds == {"list<element: int32>"}
    assert str(table.schema.field("logprobs").type) == "list<element: float>"
    first, second, third, *_ = table.to_pylist()
    assert first["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert first["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert first["logprobs"] == [0, 0, -0.5, -0.25, 0, -1]
    assert first["versions"] == [-1, -1, 5, 5, -1, 5]
    assert (first["group"], first["index"], first["reward"]) == (0, 0, 0.0)
    assert [(r["index"], r["segment_index"], r["reward"]) for r in (second, third)] == [
        (1, 0, 1.0),
        (1, 1, 1.0),
    ]
    assert first["step"] is None
    assert first["advantage"] is None
    metadata = parquet.read_schema(tmp_path / "a").metadata
    assert metadata[b"rollout.segment_schema"] == b"1"
    assert metadata[b"rollout.run"] == story.run.slug.encode()


def test_reading_a_run_leases_nothing(engine: Engine, tmp_path: Path):
    story = finished(engine)
    before = story.groups()
    write_segments(StoredGroups(engine, story.run), tmp_path / "a", run=story.run.slug)
    assert story.groups() == before
    assert {group["state"] for group in before} == {"ready"}


def test_a_leased_batch_has_its_step_and_advantages_by_rollout(engine: Engine):
    client = TrainerClient(engine, run=finished(engine).run.slug)
    table = segment_table(client.pull(3, BatchSpec(groups=1)), advantages="grpo")
    client.close()
    assert table["step"].to_pylist() == [3, 3, 3]
    low, high, again = table["advantage"].to_pylist()
    assert (round(low, 2), round(high, 2)) == (-0.71, 0.71)
    assert high == again


def test_a_data_set_without_groups_has_the_columns(engine: Engine, tmp_path: Path):
    story = StoredRun(engine)
    report = write_segments(StoredGroups(engine, story.run), tmp_path / "a", run=story.run.slug)
    assert (report.rows, parquet.read_table(tmp_path / "a").column_names) == (
        0,
        list(SEGMENT_COLUMNS),
    )


def test_rollouts_without_ids_have_no_row_and_are_counted(engine: Engine, tmp_path: Path):
    story = token_run(StoredRun(engine, n=2), ONE, [])
    report = write_segments(StoredGroups(engine, story.run), tmp_path / "a", run=story.run.slug)
    assert (report.rows, report.rollouts_without_rows) == (1, 1)


def test_groups_whose_tokens_are_gone_are_left_out_and_counted(engine: Engine, tmp_path: Path):
    story, payloads = StoredRun(engine, prompts=2, n=2), FolderPayloads(tmp_path / "payloads")
    for attempt in story.claim():
        story.record(check_out(succeeded(story, attempt, ONE), payloads))
    next(iter(tmp_path.rglob("*.tokens"))).unlink()
    groups = StoredGroups(engine, story.run, payloads=payloads)
    report = write_segments(groups, tmp_path / "a", run=story.run.slug)
    assert (report.rows, groups.unreadable) == (2, 1)
    assert {group["state"] for group in story.groups()} == {"ready"}


def test_every_column_is_documented_with_its_type():
    text = DOCS.read_text()
    for name, kind in SEGMENT_COLUMNS.items():
        assert f"| `{name}` | {kind.removesuffix('_')} |" in text


def test_the_command_writes_segments_and_says_how_many(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    name = finished(engine).run.slug
    monkeypatch.chdir(tmp_path)
    url = engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", url)
    assert run_command(["export", name, "--segments", "-o", "rows.parquet", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rollouts"], told["rows"]) == (4, 6)
    assert parquet.read_table(tmp_path / "rows.parquet").num_rows == 6
    assert run_command(["export", name, "--segments", "--to", "jsonl"]) != 0
    assert "as Parquet only" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    assert run_command(["export", name, "--to", "inspect"]) == 3
    assert "rollout-pipeline[inspect]" in capsys.readouterr().err
