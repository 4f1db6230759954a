"""A run whose error rate is too high pauses and says why; started again, it is judged anew."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.stored_run import StoredRun

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import RunState
from pipeline.store.engine import transact
from pipeline.store.operations import continue_run
from pipeline.store.run_health import MIN_JUDGED
from pipeline.store.runs import active_runs, get_run
from pipeline.store.status import run_status

BUG = ErrorClass.AGENT_BUG


def end(story: StoredRun, *, good: int = 0, bad: int = 0) -> Any:
    claimed = story.claim(good + bad)
    assert len(claimed) == good + bad
    return story.record(
        *[story.succeeded(a) for a in claimed[:good]],
        *[story.failed(a, BUG) for a in claimed[good:]],
    )


def run_of(story: StoredRun) -> Any:
    return transact(story.engine, lambda c: get_run(c, story.run.slug))


def test_a_run_pauses_when_too_many_of_its_rollouts_fail(tell):
    story = tell(prompts=40, max_error_rate=0.5, max_attempts=1)
    assert end(story, good=9, bad=10).paused == []
    report = end(story, bad=1)
    run = run_of(story)
    assert run.state is RunState.PAUSED
    assert run.state_reason == (
        "11 of 20 rollouts failed (55%, allowed are 50%), most often by agent_bug"
    )
    assert report.paused == [f"Run {run.slug} is paused because {run.state_reason}."]
    with story.engine.connect() as connection:
        assert active_runs(connection) == []
        status = run_status(connection, run)
    assert any("11 of 20 rollouts failed" in sentence for sentence in status.waits)


def test_the_bound_itself_is_still_allowed(tell):
    story = tell(prompts=40, max_error_rate=0.5, max_attempts=1)
    end(story, good=10, bad=10)
    assert run_of(story).state is RunState.ACTIVE


def test_a_few_failures_at_the_beginning_say_nothing(tell):
    story = tell(prompts=40, max_error_rate=0.1, max_attempts=1)
    end(story, bad=MIN_JUDGED - 1)
    assert run_of(story).state is RunState.ACTIVE


def test_without_a_bound_a_run_never_pauses(tell):
    story = tell(prompts=30, max_attempts=1)
    end(story, bad=30)
    assert run_of(story).state is RunState.ACTIVE


def test_a_run_that_goes_on_is_judged_anew(tell):
    story = tell(prompts=80, max_error_rate=0.5, max_attempts=1)
    end(story, bad=20)
    assert run_of(story).state is RunState.PAUSED
    transact(story.engine, lambda c: continue_run(c, story.run))
    end(story, good=10, bad=9)
    assert run_of(story).state is RunState.ACTIVE
    end(story, bad=2)
    assert run_of(story).state is RunState.PAUSED


def test_what_ends_while_the_run_is_paused_pauses_it_no_second_time(tell):
    story = tell(prompts=80, max_error_rate=0.0, max_attempts=1)
    claimed = story.claim(40)
    story.record(*[story.failed(a, BUG) for a in claimed[:20]])
    assert story.record(*[story.failed(a, BUG) for a in claimed[20:]]).paused == []
    assert len(story.rows("SELECT * FROM events WHERE entity = 'run'")) == 1


@pytest.mark.parametrize("said", ["retried", "twice"])
def test_only_final_failures_count_and_only_once(tell, said):
    story = tell(prompts=40, max_error_rate=0.5, max_attempts=2 if said == "retried" else 1)
    claimed = story.claim(30)
    story.record(*[story.failed(a, BUG) for a in claimed[: 30 if said == "retried" else 15]])
    if said == "twice":
        story.record(*[story.failed(a, BUG) for a in claimed[:15]])
    assert run_of(story).state is RunState.ACTIVE
