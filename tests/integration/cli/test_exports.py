"""Exports: one rollout a line, failed ones with their error, in both formats."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from fixtures.stored_run import StoredRun, answered
from sqlalchemy import Engine, text

from pipeline.contract.errors import ErrorClass, InputError
from pipeline.contract.messages import RewardPart
from pipeline.contract.model_call import ModelCall
from pipeline.contract.trajectory import TrajectoryRecord, pack_record
from pipeline.queue.claim_checks import check_out
from pipeline.queue.payloads import FolderPayloads
from pipeline.store.engine import transact
from pipeline.store.operations import begin_cancel, cancel_rollouts
from pipeline.store.rescores import record_rescores
from pipeline.trainer.export import export_run
from pipeline.trainer.export_files import COLUMNS, FIELDS, Format

DOCS = Path(__file__).parents[3] / "docs" / "operate.md"


def finished(engine: Engine) -> StoredRun:
    """Two groups of two: a success and a failure each."""
    story = StoredRun(engine, prompts=2, n=2, n_min=1)
    a, b, c, d = story.claim()
    story.record(
        story.succeeded(a, 1.0),
        story.failed(b, ErrorClass.CONTRACT),
        story.succeeded(c, 0.5),
        story.failed(d, ErrorClass.MODEL_BAD_REQUEST),
    )
    return story


def export(story: StoredRun, path: Path, to: Format = "jsonl", payloads: Path | None = None):
    store = FolderPayloads(payloads or path.parent / "payloads")
    return export_run(story.engine, story.run, path, to=to, payloads=store)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rollout_is_a_line_in_order_of_group_and_index(engine: Engine, tmp_path: Path):
    story = finished(engine)
    report = export(story, tmp_path / "out.jsonl")
    lines = lines_of(tmp_path / "out.jsonl")
    assert [(line["group"], line["index"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (report.rollouts, report.failed, report.unfinished, report.unreadable) == (4, 2, 0, 0)
    good = lines[0]
    assert (good["state"], good["reward"], good["stop_reason"]) == ("succeeded", 1.0, "answered")
    assert good["messages"] == [{"role": "assistant", "content": "7"}]
    assert good["prompt"]["answer"] == "1"
    assert good["label"] == f"{story.run.slug}-g000000-r0"
    assert good["error"] is None


def test_a_failed_rollout_has_its_error_and_no_reward(engine: Engine, tmp_path: Path):
    export(finished(engine), tmp_path / "out.jsonl")
    failed = lines_of(tmp_path / "out.jsonl")[1]
    assert (failed["state"], failed["reward"], failed["messages"]) == ("failed", None, [])
    assert failed["error"] == {
        "class": "contract",
        "code": "test",
        "message": "It went wrong.",
        "phase": "",
    }


def test_rollouts_that_are_not_done_are_counted_and_left_out(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, prompts=1, n=3)
    story.record(story.succeeded(story.claim_one()))
    report = export(story, tmp_path / "out.jsonl")
    assert (report.rollouts, report.unfinished) == (1, 2)
    assert len(lines_of(tmp_path / "out.jsonl")) == 1


def test_parquet_has_the_same_lines_in_typed_columns(engine: Engine, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    story = finished(engine)
    export(story, tmp_path / "out.parquet", to="parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    rows = table.to_pylist()
    assert [row["reward"] for row in rows] == [1.0, None, 0.5, None]
    assert [row["error_class"] for row in rows] == [None, "contract", None, "model_bad_request"]
    assert json.loads(rows[0]["messages"]) == [{"role": "assistant", "content": "7"}]
    assert table.schema.metadata[b"rollout.run"] == story.run.slug.encode()


def documented() -> dict[str, str]:
    """The columns of docs/operate.md, with their types."""
    section = DOCS.read_text().partition("## Export\n")[2].partition("\n## ")[0]
    cells = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {name.strip(" `"): kind.strip() for _, name, kind, *_ in cells}


def type_name(kind: str) -> str:
    fields = "{" + ", ".join(FIELDS.get(kind, ())) + "}"
    return {"rewards": f"list of {fields}"}.get(kind, fields if kind in FIELDS else kind)


def test_both_formats_have_the_columns_that_are_documented(engine: Engine, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    story = finished(engine)
    export(story, tmp_path / "out.jsonl")
    export(story, tmp_path / "out.parquet", to="parquet")
    assert documented() == {name: type_name(kind) for name, kind in COLUMNS.items()}
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.names == list(documented())
    lines, rows = lines_of(tmp_path / "out.jsonl"), table.to_pylist()
    for line, row in zip(lines, rows, strict=True):
        assert list(line) == list(documented())
        as_json = [name for name, kind in COLUMNS.items() if kind == "json"]
        as_line = {name: json.loads(row[name] or "null") for name in as_json}
        row["finished_at"] = row["finished_at"].isoformat()
        assert line == row | as_line


def test_types_of_parquet_do_not_depend_on_what_there_is(engine: Engine, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    empty = StoredRun(engine, prompts=0)
    nulls = StoredRun(engine, prompts=1, n=1)
    transact(engine, lambda c: begin_cancel(c, nulls.run))
    transact(engine, lambda c: cancel_rollouts(c, nulls.run))
    schemas = []
    for n, story in enumerate((empty, nulls, finished(engine))):
        export(story, tmp_path / f"{n}.parquet", to="parquet")
        schemas.append(parquet.read_schema(tmp_path / f"{n}.parquet").remove_metadata())
    assert schemas[0] == schemas[1] == schemas[2]
    (row,) = parquet.read_table(tmp_path / "1.parquet").to_pylist()
    assert row["state"] == "cancelled"
    for name in ("reward", "error", "model", "latency_s", "prompt_tokens", "final_answer"):
        assert row[name] is None, name
    types = {name: str(schemas[1].field(name).type) for name in ("reward", "row", "finished_at")}
    assert types == {"reward": "double", "row": "int64", "finished_at": "timestamp[us, tz=UTC]"}


def test_a_line_tells_answer_scores_model_and_time(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, prompts=1, n=1, n_min=1)
    attempt = story.claim_one()
    call = ModelCall(sequence=0, model="qwen", endpoint="http://127.0.0.1:9/v1")
    body = pack_record(answered("7", calls=[call]))
    parts = (RewardPart(name="numeric", value=1.0), RewardPart(name="numeric.x", value=0.25))
    told = {"body": body, "timings": {"elapsed_s": 1.5}, "reward_parts": parts}
    said = story.succeeded(attempt, **told)
    story.record(said)
    later = (RewardPart(name="judge", value=0.5, scorer_version="2"),)
    rescored = said.model_copy(update={"purpose": "rescore", "reward_parts": later})
    transact(engine, lambda c: record_rescores(c, [rescored]))
    export(story, tmp_path / "out.jsonl")
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert (line["final_answer"], line["model"], line["latency_s"]) == ("7", "qwen", 1.5)
    assert (line["dataset"], line["row"], line["epoch"]) == ("numbers", 0, 0)
    assert line["endpoint"] == "http://127.0.0.1:9/v1"
    assert [(part["name"], part["version"], part["value"]) for part in line["rewards"]] == [
        ("judge", "2", 0.5),
        ("numeric", "1", 1.0),
        ("numeric.x", "1", 0.25),
    ]


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_a_line_has_diff_tests_and_metadata(engine: Engine, tmp_path: Path, to: Format):
    if to == "parquet":
        pytest.importorskip("pyarrow")
    story = StoredRun(engine, prompts=1, n=2, n_min=1)
    coded, plain = story.claim()
    tests = {"passed": True, "exit_code": 0, "timed_out": False, "output": "2 passed"}
    metadata = {"diff": "--- a\n+++ b\n", "tests": tests, "usage": {"model_calls": 3}}
    body = pack_record(answered("7", metadata=metadata))
    story.record(story.succeeded(coded, body=body), story.succeeded(plain))
    export(story, tmp_path / "out", to)
    if to == "jsonl":
        first, second = lines_of(tmp_path / "out")
    else:
        import pyarrow.parquet as pq

        first, second = pq.read_table(tmp_path / "out").to_pylist()
        for line in (first, second):
            line |= {name: json.loads(line[name] or "null") for name in ("tests", "metadata")}
    assert (first["final_answer"], first["stop_reason"]) == ("7", "answered")
    assert (first["diff"], first["tests"]) == ("--- a\n+++ b\n", tests)
    assert first["metadata"] == {"usage": {"model_calls": 3}}
    assert (second["diff"], second["tests"], second["metadata"]) == (None, None, {})


def test_the_memory_of_an_export_does_not_grow_with_it(engine: Engine, tmp_path: Path):
    pytest.importorskip("pyarrow.parquet")
    long = "x" * 1_000_000
    body = pack_record(TrajectoryRecord(messages=[{"role": "assistant", "content": long}]))

    def peak_bytes(n: int) -> int:
        story = StoredRun(engine, prompts=n, n=1, n_min=1)
        story.record(*(story.succeeded(a, body=body) for a in story.claim(n)))
        tracemalloc.start()
        export(story, tmp_path / "out.parquet", to="parquet")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(160) < 1.5 * peak_bytes(80)


def test_a_run_without_rollouts_gives_an_empty_file(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, prompts=0)
    assert export(story, tmp_path / "out.jsonl").rollouts == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_trajectories_in_the_payload_store_are_read_from_there(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, prompts=1, n=1)
    store = FolderPayloads(tmp_path / "payloads")
    story.record(check_out(story.succeeded(story.claim_one()), store))
    export(story, tmp_path / "out.jsonl")
    assert lines_of(tmp_path / "out.jsonl")[0]["messages"][0]["content"] == "7"


def test_a_trajectory_that_is_gone_spoils_only_its_own_line(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, prompts=1, n=2)
    store = FolderPayloads(tmp_path / "payloads")
    a, b = story.claim()
    story.record(check_out(story.succeeded(a), store), story.succeeded(b))
    for path in (tmp_path / "payloads").rglob("*.frame"):
        path.unlink()
    report = export(story, tmp_path / "out.jsonl")
    first, second = lines_of(tmp_path / "out.jsonl")
    assert report.unreadable == 1
    assert "gone" in first["unreadable"]
    assert first["messages"] == []
    assert second["unreadable"] is None


def test_another_trajectory_than_the_accepted_one_is_not_exported(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, prompts=1, n=2)
    story.record(*(story.succeeded(attempt) for attempt in story.claim()))
    swap = "UPDATE trajectories SET body = 'x' WHERE (rollout_id, attempt_no) IN (SELECT"
    swap += " rollout_id, winner_attempt_no FROM rollouts WHERE rollout_index = 0)"
    transact(engine, lambda c: c.execute(text(swap)))
    assert export(story, tmp_path / "out.jsonl").unreadable == 1
    first, second = lines_of(tmp_path / "out.jsonl")
    assert "not the one that was accepted" in first["unreadable"]
    assert (first["messages"], second["unreadable"]) == ([], None)


def test_a_file_that_is_there_is_replaced_only_by_a_whole_one(engine: Engine, tmp_path: Path):
    story = finished(engine)
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with engine.begin() as connection:
        # Makes the last row unreadable for the query itself.
        connection.execute(text("ALTER TABLE trajectories RENAME COLUMN codec TO kodec"))
    with pytest.raises(Exception, match="codec"):
        export(story, path)
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_place_that_cannot_be_written_is_named(engine: Engine, tmp_path: Path):
    with pytest.raises(InputError, match="nowhere") as refused:
        export(StoredRun(engine), tmp_path / "nowhere" / "out.jsonl")
    assert refused.value.code == "E109"


def test_an_export_changes_nothing(engine: Engine, tmp_path: Path):
    story = finished(engine)
    before = story.everything()
    export(story, tmp_path / "out.jsonl")
    assert story.everything() == before
