"""`rollout policy` and `rollout why`, on a real store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.train_batch import BatchSpec
from pipeline.trainer.client import TrainerClient
from rollout.app import run_command

Cli = Callable[..., Any]


@pytest.fixture
def cli(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Any) -> Cli:
    """Call the command line on the store of this test."""
    monkeypatch.chdir(tmp_path)
    url = engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", url)

    def call(*arguments: str, code: int = 0, as_json: bool = True) -> Any:
        capsys.readouterr()
        assert run_command([*arguments, *(["--json"] if as_json else [])]) == code
        out = capsys.readouterr().out
        return json.loads(out) if as_json else out

    return call


def test_what_is_published_is_listed(cli, engine):
    story = StoredRun(engine)
    name = story.run.slug
    told = cli("policy", "publish", name, "2", "--endpoint", "http://10.0.0.1/v1")
    assert told == {"run": name, "version": 2, "mode": "keep", "changed": True}
    assert not cli("policy", "publish", name, "2")["changed"]
    cli("policy", "publish", name, "3", "--mode", "abort", "--uri", "file:///w3")
    newest, oldest = cli("policy", "list", name)["versions"]
    assert (newest["version"], newest["mode"], newest["uri"]) == (3, "abort", "file:///w3")
    assert (oldest["version"], oldest["endpoints"]) == (2, ["http://10.0.0.1/v1"])
    assert "http://10.0.0.1/v1" in cli("policy", "list", name, as_json=False)


def test_a_version_that_goes_backwards_is_refused(cli, engine):
    name = StoredRun(engine).run.slug
    cli("policy", "publish", name, "5")
    told = cli("policy", "publish", name, "4", code=7)["error"]
    assert told["code"] == "E136"
    assert "from 6 on" in told["remedy"]


def test_why_a_trainer_waits_is_the_same_sentence_everywhere(cli, engine):
    story = StoredRun(engine, prompts=3, n=2)
    name = story.run.slug
    told = cli("why", name)
    assert told["trainer"].startswith("The trainer waits for 16 groups and 0 are ready")
    assert cli("status", name)["trainer"] is None, "it has had no trainer yet"
    story.record(*(story.succeeded(each) for each in story.claim(4)))
    trainer = TrainerClient(engine, run=name)
    trainer.pull(0, BatchSpec(groups=1))
    told = cli("why", name)
    assert told["trainer"] == (
        "1 group is ready and the trainer asks for 1: it can pull, unless its batch asks for more "
        "usable rollouts than they have."
    )
    assert cli("status", name)["trainer"] == told["trainer"] == trainer.stats().why
    assert told["trainer"] in cli("status", name, as_json=False)
    assert cli("why", name, as_json=False).splitlines() == [told["trainer"], *told["waits"]]


def test_a_pull_takes_tokens_and_drops_what_is_too_old_for_the_trained_version(cli, engine):
    story = StoredRun(engine, prompts=4, n=2)
    ends = [story.succeeded(each, version_min=each.group_no + 1) for each in story.claim()]
    story.record(*ends)
    pull = ("pull", story.run.slug, "--consumer", "t", "--step", "0")
    options = ("--policy-version", "5", "--max-staleness", "2", "--tokens", "6")
    assert [group["prompt"]["answer"] for group in cli(*pull, *options)["groups"]] == ["3"]
    assert story.groups()[0]["state"] == story.groups()[1]["state"] == "dropped"
    assert "exclude" in cli(*pull, *options, "--groups", "1", code=2)["error"]["message"]
