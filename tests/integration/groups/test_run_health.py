"""A run whose error rate is too high pauses and says why; started again, it is judged anew."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.stored_run import StoredRun

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import RunState
from pipeline.store.engine import transact
from pipeline.store.operations import continue_run, pause_run
from pipeline.store.run_health import MIN_JUDGED
from pipeline.store.runs import active_runs, get_run
from pipeline.store.status import RunStatus, run_status

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


def status_of(story: StoredRun) -> RunStatus:
    return transact(story.engine, lambda c: run_status(c, story.run))


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


def test_without_a_bound_a_run_pauses_when_all_of_its_first_rollouts_failed(tell):
    story = tell(prompts=40, max_attempts=1)
    end(story, bad=MIN_JUDGED - 1)
    assert run_of(story).state is RunState.ACTIVE
    end(story, bad=1)
    run = run_of(story)
    assert run.state is RunState.PAUSED
    assert run.state_reason == "all of the first 20 rollouts failed, most often by agent_bug"
    status = transact(story.engine, lambda c: run_status(c, run))
    assert status.has_failed
    assert status.to_json()["state_reason"] == run.state_reason
    assert any(f"rollout continue {run.slug}" in sentence for sentence in status.waits)


@pytest.mark.parametrize("good_first", [True, False])
def test_without_a_bound_one_success_among_the_first_is_enough(tell, good_first):
    story = tell(prompts=60, max_attempts=1)
    for good, bad in [(1, 0), (0, 19)] if good_first else [(0, 19), (1, 0)]:
        end(story, good=good, bad=bad)
    end(story, bad=40)
    assert run_of(story).state is RunState.ACTIVE


def test_of_a_large_run_the_first_twentieth_must_have_failed(tell):
    story = tell(prompts=150, n=4, max_attempts=1)
    end(story, bad=29)
    assert run_of(story).state is RunState.ACTIVE
    end(story, bad=1)
    assert run_of(story).state is RunState.PAUSED


def test_a_bound_of_one_allows_every_failure(tell):
    story = tell(prompts=30, max_error_rate=1.0, max_attempts=1)
    end(story, bad=30)
    assert run_of(story).state is RunState.ACTIVE
    assert not status_of(story).has_failed


@pytest.mark.parametrize(
    ("bad", "bound", "has_failed"),
    [
        (2, None, False),
        (3, None, True),
        (1, 0.25, False),
        (2, 0.25, True),
        (4, 1.0, False),
    ],
)
def test_a_finished_run_has_failed_above_its_share_of_failures(tell, bad, bound, has_failed):
    story = tell(prompts=4, max_error_rate=bound, max_attempts=1)
    end(story, good=4 - bad, bad=bad)
    assert status_of(story).state is RunState.FINISHED
    assert status_of(story).has_failed is has_failed


def test_a_run_paused_for_its_failures_has_failed_when_nothing_is_under_way(tell):
    story = tell(prompts=40, max_attempts=1)
    claimed = story.claim(22)
    story.record(*[story.failed(a, BUG) for a in claimed[:20]])
    assert not status_of(story).has_failed
    # What ends after the pause takes nothing back of what it was for.
    story.record(*[story.succeeded(a) for a in claimed[20:]])
    assert status_of(story).has_failed


def test_a_run_that_an_operator_paused_has_not_failed(tell):
    story = tell(prompts=40, max_attempts=1)
    end(story, bad=MIN_JUDGED - 1)
    transact(story.engine, lambda c: pause_run(c, story.run))
    assert not status_of(story).has_failed


def test_without_a_bound_a_run_that_goes_on_is_judged_anew(tell):
    story = tell(prompts=80, max_attempts=1)
    end(story, bad=20)
    transact(story.engine, lambda c: continue_run(c, story.run))
    end(story, bad=19)
    assert run_of(story).state is RunState.ACTIVE
    end(story, bad=1)
    assert run_of(story).state is RunState.PAUSED


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
