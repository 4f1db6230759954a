"""The example that reads the store: on its own small run, and on a store that is named."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.contract.trajectory import TrajectoryRecord, pack_record

ROOT = Path(__file__).resolve().parents[2]
BROWSE = ROOT / "examples" / "trajectory_client" / "browse.py"
pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Browser:
    """The example in this process, on a named store."""

    main: Callable[[], int]
    patch: pytest.MonkeyPatch
    screen: pytest.CaptureFixture[str]

    def call(self, *arguments: str) -> tuple[int, str, str]:
        self.patch.setattr(sys, "argv", ["browse.py", *arguments])
        code = self.main()
        return code, *self.screen.readouterr()

    def __call__(self, *arguments: str) -> str:
        code, out, err = self.call(*arguments)
        assert code == 0, out + err
        return out


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    """Two groups of two: rewards 1 and 0, and an error with a partial trajectory."""
    story = StoredRun(engine, prompts=2, n=2, n_min=1, slug="told", max_attempts=1)
    a, b, c, d = story.claim()
    partial = pack_record(TrajectoryRecord(messages=[{"role": "user", "content": "so far"}]))
    failed = story.failed(c, ErrorClass.MODEL_TRANSPORT, body=partial, body_bytes=len(partial))
    story.record(story.succeeded(a, 1.0), story.succeeded(b, 0.0), failed, story.succeeded(d, 1.0))
    return story


@pytest.fixture
def browse(
    story: StoredRun,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Browser:
    monkeypatch.syspath_prepend(str(BROWSE.parent))
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", database_url)
    monkeypatch.chdir(tmp_path)
    return Browser(importlib.import_module("browse").main, monkeypatch, capsys)


def test_offline_it_shows_every_function_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", BROWSE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny: finished, 12 rollouts" in done.stdout
    assert "tiny-g000001-r1  failed     model_bad_request" in done.stdout
    assert "action        calculator(expression='15 * 24')" in done.stdout
    assert "export: 8 rollouts with reward 1" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_runs_and_rollouts_are_listed(browse):
    assert "told: finished, 4 rollouts" in browse("runs")
    listed = browse("list", "told", "--limit", "3").splitlines()
    assert [line.split()[0] for line in listed] == [
        "told-g000000-r0",
        "told-g000000-r1",
        "told-g000001-r0",
    ]


def test_a_rollout_is_shown_with_its_error_and_its_partial_trajectory(browse):
    assert "final_answer  7" in browse("get", "told-g000000-r0")
    failed = browse("get", "told-g000001-r0")
    assert "so far" in failed
    assert "model_transport: It went wrong." in failed


@pytest.mark.parametrize(
    ("options", "n"),
    [
        (("--state", "failed"), 1),
        (("--min-reward", "1"), 2),
        (("--max-reward", "0.5"), 1),
        (("--text", "so far"), 1),
        (("--stop-reason", "answered", "--min-reward", "0"), 3),
        ((), 4),
    ],
)
def test_rollouts_are_filtered_and_exported_alike(browse, tmp_path, options, n):
    assert len(browse("filter", "told", *options).splitlines()) == n
    assert f"{n} rollouts" in browse("export", "told", "-o", "out.jsonl", *options)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == n
    assert {line["run"] for line in lines} == {"told"}


def test_statistics_are_those_of_the_run(browse):
    figures = json.loads(browse("statistics", "told"))
    assert figures["rollouts"]["total"] == 4
    assert figures["reward"]["n"] == 3
    assert figures["stop_reasons"] == {"answered": 3}
    assert figures["errors"] == {"model_transport": 1}


def test_reading_leases_and_changes_nothing(browse, story):
    before = story.everything()
    for arguments in (("list", "told"), ("statistics", "told"), ("get", "told-g000000-r0")):
        browse(*arguments)
    assert story.everything() == before
    assert {group["state"] for group in story.groups()} == {"ready"}


def test_what_is_not_there_is_said(browse, tmp_path):
    code, out, err = browse.call("list", "nothing")
    assert (code, out) == (1, "")
    assert "nothing" in err
    browse.patch.delenv("ROLLOUT_DATABASE__URL")
    code, _, err = browse.call("list", "told")
    assert code == 1
    assert "There are no runs in" in err
    assert list(tmp_path.iterdir()) == []
