"""`rollout errors --trace`: where user code went wrong, each place once."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.command_line import CommandLine, servers_of
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass
from pipeline.contract.messages import ErrorRecord


@pytest.fixture
def rollout(tmp_path: Path, database_url: str, redis_place: BrokerPlace) -> CommandLine:
    return CommandLine(tmp_path, **servers_of(database_url, redis_place))


def trace_of(value: str, *, wrapped: bool = False) -> ErrorRecord:
    """Fail as user code does, with a value in the message."""
    try:
        try:
            int(value)
        except ValueError as error:
            if wrapped:
                raise RuntimeError(f"no number: {value}") from error
            raise
    except (ValueError, RuntimeError) as error:
        return ErrorRecord(
            error_class=ErrorClass.AGENT_BUG,
            code="agent_raised",
            message=str(error),
            detail="".join(traceback.format_exception(error)),
        )
    raise AssertionError


def failing(engine: Engine) -> StoredRun:
    """Three attempts fail at one place with different values, one at another, one without trace."""
    story = StoredRun(engine, prompts=5, n=1, slug="bad", max_attempts=1)
    a, b, c, d, e = story.claim()
    for attempt, value in ((a, "one"), (b, "two"), (c, "\x1b[31mthree")):
        story.record(story.failed(attempt, error=trace_of(value)))
    story.record(story.failed(d, error=trace_of("four", wrapped=True)))
    story.record(story.failed(e, ErrorClass.MODEL_TRANSPORT))
    return story


def test_equal_tracebacks_are_counted_and_shown_once(engine: Engine, rollout: CommandLine):
    failing(engine)
    told = rollout.json("errors", "bad", "--trace")
    assert sum(row["attempts"] for row in told["errors"]) == 5
    first, second = told["tracebacks"]
    assert (first["attempts"], first["label"]) == (3, "bad-g000002-r0-a1")
    assert first["traceback"].startswith("Traceback (most recent call last)")
    assert first["traceback"].rstrip().endswith("three'")
    assert (second["attempts"], second["code"]) == (1, "agent_raised")
    assert "direct cause" in second["traceback"]
    assert len(rollout.json("errors", "bad", "--trace", "--limit", "1")["tracebacks"]) == 1
    assert "tracebacks" not in rollout.json("errors", "bad")


def test_tracebacks_are_printed_so_that_they_cannot_drive_a_terminal(
    engine: Engine, rollout: CommandLine
):
    failing(engine)
    shown = rollout("errors", "bad", "--trace").out
    assert "── 3 × agent_raised, the last one bad-g000002-r0-a1" in shown
    assert "    int(value)" in shown
    assert "\x1b" not in shown
    assert "Traceback" not in rollout("errors", "bad").out


def test_a_run_without_tracebacks_says_so(engine: Engine, rollout: CommandLine):
    story = StoredRun(engine, prompts=1, n=1, slug="calm", max_attempts=1)
    story.record(story.failed(story.claim_one(), ErrorClass.MODEL_TRANSPORT))
    assert "No attempt left a traceback." in rollout("errors", "calm", "--trace").out
