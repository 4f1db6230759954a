"""Stories whose books are checked when they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.store.accounting import check_accounting
from rollout.app import run_command

StoryMaker = Callable[..., StoredRun]
Cli = Callable[..., Any]


@pytest.fixture
def tell(engine: Engine) -> Iterator[StoryMaker]:
    """Begin a story; however it goes, its books balance at its end."""
    stories: list[StoredRun] = []

    def begin(**config: Any) -> StoredRun:
        story = StoredRun(engine, **config)
        stories.append(story)
        return story

    yield begin
    with engine.connect() as connection:
        for story in stories:
            assert check_accounting(connection, story.run.run_id) == []


@pytest.fixture
def cli(database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Cli:
    """Call the command line on the test's database; returns its document."""
    monkeypatch.setenv("ROLLOUT_DATABASE__URL", database_url)

    def call(*arguments: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run_command([*arguments, "--json"]) == code, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return call
