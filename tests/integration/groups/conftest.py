"""Stories whose books are checked when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.store.accounting import check_accounting

StoryMaker = Callable[..., StoredRun]


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
