"""The example of a whole trainer loop: on private servers, and through crashes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.short_folders import short_folder
from fixtures.stored_run import StoredRun, answered
from sqlalchemy import Engine

from pipeline.contract.errors import ServiceUnavailable
from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import pack_record
from pipeline.embedded import EmbeddedServices
from pipeline.store.engine import open_engine
from pipeline.store.schema import upgrade
from pipeline.trainer.client import TrainerClient

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("train_loop")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with private servers."""
    with short_folder() as folder:
        yield folder
        EmbeddedServices(folder / ".rollout", durable=False).remove()


def answered_run(engine: Engine, slug: str, prompts: int = 4) -> StoredRun:
    """A run in which each question got its right answer once and a wrong one once."""
    story = StoredRun(engine, prompts=prompts, n=2, slug=slug)
    for attempt in story.claim():
        right = attempt.rollout_index == 0
        said = attempt.payload["answer"] if right else "no"
        body = pack_record(answered(said))
        story.record(story.succeeded(attempt, float(right), body=body, body_bytes=len(body)))
    return story


def run_example(folder: Path, *arguments: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_loop.py"), *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_on_the_private_servers_of_its_folder(folder: Path):
    engine = open_engine(EmbeddedServices(folder / ".rollout", durable=False).start_postgres())
    upgrade(engine)
    story = answered_run(engine, "sums")
    shown = run_example(folder, "sums", "--groups", "2")
    assert "step 0: 2 groups, mean reward 0.500\nstep 1: 2 groups" in shown
    assert [group["state"] for group in story.groups()] == ["consumed"] * 4
    stored = json.loads((folder / "checkpoint.json").read_text())
    assert stored["step"] == 1
    assert all(table["no"] < 0 < max(table.values()) for table in stored["preferences"].values())
    assert "0 steps" in run_example(folder, "sums", "--groups", "2")
    engine.dispose()


def test_without_a_running_store_the_client_says_what_to_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    with pytest.raises(ServiceUnavailable, match="rollout up"):
        TrainerClient.connect("sums")
    assert list(folder.iterdir()) == []


class Crash(Exception):
    """The process ends here."""


class CrashingClient(TrainerClient):
    """Ends at the first commit, before or after it is done."""

    is_done: bool

    def commit(self, upto_step: int, *, checkpoint_uri: str | None = None) -> int:
        if self.is_done:
            super().commit(upto_step, checkpoint_uri=checkpoint_uri)
        raise Crash


@pytest.mark.parametrize("is_done", [False, True])
def test_a_crash_around_the_commit_trains_no_step_twice(
    example: Any, engine: Engine, tmp_path: Path, is_done: bool
):
    story = answered_run(engine, "sums")
    path = tmp_path / "checkpoint.json"
    crashing = CrashingClient(engine, run="sums")
    crashing.is_done = is_done
    with pytest.raises(Crash):
        example.train(crashing, example.Checkpoint.load(path), BatchSpec(groups=2))
    seen = json.loads(path.read_text())
    assert (seen["step"], len(seen["preferences"])) == (0, 2)

    checkpoint = example.Checkpoint.load(path)
    assert example.train(TrainerClient(engine, run="sums"), checkpoint, BatchSpec(groups=2)) == 1
    assert [group["state"] for group in story.groups()] == ["consumed"] * 4
    after = json.loads(path.read_text())["preferences"]
    assert {question: after[question] for question in seen["preferences"]} == seen["preferences"]
    assert len(after) == 4


def test_a_crash_before_the_checkpoint_repeats_the_step_with_the_same_groups(
    example: Any, engine: Engine, tmp_path: Path
):
    answered_run(engine, "sums")
    client = TrainerClient(engine, run="sums")
    lost = client.pull(0, BatchSpec(groups=2))
    checkpoint = example.Checkpoint.load(tmp_path / "checkpoint.json")
    assert example.train(client, checkpoint, BatchSpec(groups=2)) == 2
    trained = list(checkpoint.policy.preferences)
    assert trained[:2] == [group.prompt["content"] for group in lost.groups]
