"""Runs as logs that Inspect itself reads; run by `make test-inspect`."""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, InputError
from pipeline.contract.trajectory import TrajectoryRecord, pack_record
from pipeline.queue.payloads import FolderPayloads

pytest.importorskip("inspect_ai", reason="Inspect is not installed: make test-inspect installs it")

from inspect_ai.log import read_eval_log, read_eval_log_sample

from pipeline.trainer.adapters.inspect_log import write_inspect_log

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BROKEN = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, BROKEN]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "assistant", "content": "2"},
]


def finished(engine: Engine) -> StoredRun:
    """Two groups of two: a success and a failure each."""
    story = StoredRun(engine, prompts=2, n=2, n_min=1)
    step = {"step_type": "final_answer", "content": "2", "metadata": {}}
    body = pack_record(TrajectoryRecord(messages=MESSAGES, steps=[step]))
    a, b, c, d = story.claim()
    story.record(
        story.succeeded(a, 1.0, body=body),
        story.failed(b, ErrorClass.CONTRACT),
        story.succeeded(c, 0.5, body=body),
        story.failed(d, ErrorClass.CONTRACT),
    )
    return story


def write(story: StoredRun, path: Path) -> Any:
    payloads = FolderPayloads(path.parent / "payloads")
    return write_inspect_log(story.engine, story.run, path, payloads=payloads)


@pytest.mark.parametrize("suffix", ["eval", "json"])
def test_inspect_reads_a_run_with_its_scores_and_errors(
    engine: Engine, tmp_path: Path, suffix: str
):
    story = finished(engine)
    report = write(story, tmp_path / f"log.{suffix}")
    assert (report.rollouts, report.failed) == (4, 2)
    log = read_eval_log(str(tmp_path / f"log.{suffix}"))
    assert (log.status, log.eval.task, log.eval.config.epochs) == ("success", story.run.slug, 2)
    assert log.results.scores[0].metrics["mean"].value == 0.75
    assert (log.results.total_samples, log.results.completed_samples) == (4, 2)
    first = f"{story.run.slug}-g000000"
    good, failed = (each for each in log.samples if each.id == first)
    assert (good.epoch, failed.epoch) == (1, 2)
    assert (good.scores["reward"].value, good.scores["numeric"].value) == (1.0, 1.0)
    assert (good.target, good.output.completion) == ("1", "2")
    assert good.error is None
    assert failed.scores is None
    assert failed.error.message.startswith("contract: ")


def test_a_conversation_keeps_its_tool_calls(engine: Engine, tmp_path: Path):
    story = finished(engine)
    write(story, tmp_path / "log.eval")
    sample = read_eval_log_sample(str(tmp_path / "log.eval"), f"{story.run.slug}-g000000", 1)
    assert [message.role for message in sample.messages] == [m["role"] for m in MESSAGES]
    called, broken = sample.messages[2].tool_calls
    assert (called.function, called.arguments) == ("add", {"a": 1})
    assert broken.parse_error is not None
    assert sample.messages[1].text == "1 + 1?"
    assert sample.messages[3].tool_call_id == "c1"


def test_a_run_under_way_is_no_finished_log(engine: Engine, tmp_path: Path):
    story = StoredRun(engine, n=2)
    story.record(story.succeeded(story.claim_one()))
    assert write(story, tmp_path / "log.eval").unfinished == 1
    assert read_eval_log(str(tmp_path / "log.eval")).status == "started"


def test_a_place_that_cannot_be_written_is_named(engine: Engine, tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written"):
        write(finished(engine), tmp_path / "no" / "log.eval")
