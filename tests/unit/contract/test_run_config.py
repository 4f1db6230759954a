"""What a run may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.contract.errors import SCORED_BY_DEFAULT, Action, ErrorClass
from pipeline.contract.messages import COMPLETION_QUEUE, HEARTBEAT_QUEUE
from pipeline.contract.run import RunConfig, check_slug, own_queue_of, rescore_queue_of
from pipeline.settings.sections import WorkerSettings


def test_a_config_read_back_is_the_config():
    config = RunConfig(n=4, on_error={ErrorClass.SANDBOX: Action.FAIL}, tools=("calculator",))
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("error_class", sorted(set(ErrorClass) - set(SCORED_BY_DEFAULT)))
def test_no_run_can_ask_to_score_an_infrastructure_failure(error_class):
    with pytest.raises(ValidationError, match="nothing to score"):
        RunConfig(on_error={error_class: Action.SCORE})


@pytest.mark.parametrize("action", [Action.OBSERVE, Action.RETRY_LOST])
def test_actions_that_are_ours_to_choose_cannot_be_asked_for(action):
    with pytest.raises(ValidationError, match="cannot be handled by"):
        RunConfig(on_error={ErrorClass.SANDBOX: action})


def test_a_group_cannot_need_more_rollouts_than_are_asked_of_it():
    with pytest.raises(ValidationError, match="n_min=5"):
        RunConfig(n=4, n_min=5)


@given(n=st.integers(1, 64), n_min=st.none() | st.integers(0, 64))
def test_a_group_never_needs_more_than_it_has(n, n_min):
    if n_min is not None and n_min > n:
        return
    assert RunConfig(n=n, n_min=n_min).usable_min <= n


@pytest.mark.parametrize("slug", ["a", "math7", "0.1_x-y", "a" * 63])
def test_a_plain_word_can_name_a_run(slug):
    assert check_slug(slug) == slug


@pytest.mark.parametrize("slug", ["", "-a", "A", "a b", "a/b", "a" * 64, "ä", "a\n"])
def test_what_would_break_ids_or_file_names_cannot_name_a_run(slug):
    with pytest.raises(ValueError, match="cannot name a run"):
        check_slug(slug)


OWN_QUEUES = [
    COMPLETION_QUEUE,
    HEARTBEAT_QUEUE,
    # As SQS names them.
    COMPLETION_QUEUE.replace(".", "-"),
    HEARTBEAT_QUEUE.replace(".", "-"),
    "celeryev.1",
    "celery.pidbox",
]


@pytest.mark.parametrize("queue", [*OWN_QUEUES, " "])
def test_neither_runs_nor_workers_may_name_a_queue_of_the_pipeline_itself(queue):
    for name_it in (lambda: RunConfig(queue=queue), lambda: WorkerSettings(queues=(queue,))):
        with pytest.raises(ValidationError, match=r"choose another name|needs a name"):
            name_it()


@pytest.mark.parametrize("queue", [own_queue_of("math7"), rescore_queue_of("x"), "rollout-gpu"])
def test_other_queues_may_be_named(queue):
    assert RunConfig(queue=queue).queue == queue
    assert WorkerSettings(queues=(queue,)).queues == (queue,)


def test_a_stored_run_with_a_queue_that_is_refused_today_can_be_read():
    stored = RunConfig().model_dump(mode="json") | {"queue": COMPLETION_QUEUE}
    assert RunConfig.stored(stored).queue == COMPLETION_QUEUE
