"""Groups, rollouts and errors as `show` and `errors` read them."""

from __future__ import annotations

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import ErrorClass, NotFound
from pipeline.store.engine import transact
from pipeline.store.inspection import find_group, find_rollout, read_group, read_rollout
from pipeline.store.run_errors import errors_by_class, errors_by_worker


@pytest.fixture
def story(engine: Engine) -> StoredRun:
    story = StoredRun(engine, prompts=2, n=2, slug="math-g7", n_min=1)
    a, b, c, d = story.claim()
    story.record(
        story.succeeded(a),
        story.failed(b, ErrorClass.MODEL_TRANSPORT),
        story.succeeded(c),
        story.failed(d, ErrorClass.CONTRACT, worker_id="w2"),
    )
    story.record(story.succeeded(story.claim_one()))
    return story


def find(story: StoredRun, how, name: str):
    return transact(story.engine, lambda c: how(c, name))


def test_a_rollout_is_found_by_label_by_an_attempts_label_and_by_id(story: StoredRun):
    wanted = story.rollouts()[1]["rollout_id"]
    for name in ("math-g7-g000000-r1", "math-g7-g000000-r1-a2", "math-g000000-r1"):
        assert find(story, find_rollout, name) == wanted
    assert find(story, find_rollout, str(wanted)) == wanted
    assert find(story, find_rollout, str(wanted)[:13]) == wanted
    assert find(story, find_rollout, str(wanted).upper()) == wanted


def test_a_group_is_found_by_label_and_by_id(story: StoredRun):
    wanted = story.groups()[1]["group_id"]
    assert find(story, find_group, "math-g7-g000001") == wanted
    assert find(story, find_group, str(wanted)[:8]) == wanted


@pytest.mark.parametrize(
    "name", ["math-g7-g000009-r0", "math-g7-g000000-r9", "nobody-g000000-r0", "0000", "ab", "x'--"]
)
def test_what_is_not_there_is_not_found(story: StoredRun, name: str):
    with pytest.raises(NotFound):
        find(story, find_rollout, name)


def test_a_group_is_read_with_its_rollouts(story: StoredRun):
    group_id = story.groups()[0]["group_id"]
    found = transact(story.engine, lambda c: read_group(c, group_id))
    assert (found["label"], found["state"], found["n"]) == ("math-g7-g000000", "ready", 2)
    assert [each["attempts"] for each in found["rollouts"]] == [1, 2]
    assert found["source"] == {"dataset": "numbers", "split": "train", "row": 0}


def test_a_rollout_is_read_with_all_its_attempts(story: StoredRun):
    rollout_id = story.rollouts()[1]["rollout_id"]
    found = transact(story.engine, lambda c: read_rollout(c, rollout_id))
    assert (found["label"], found["state"]) == ("math-g7-g000000-r1", "succeeded")
    first, second = found["attempts"]
    assert first["error"]["class"] == "model_transport"
    assert first["trajectory"] is None
    assert second["error"] is None
    assert second["trajectory"].body
    assert [each["name"] for each in found["rewards"]] == ["numeric"]


def test_errors_by_class_tell_tries_from_final_failures(story: StoredRun):
    rows = transact(story.engine, lambda c: errors_by_class(c, story.run))
    assert [(row["error_class"], row["attempts"], row["rollouts"]) for row in rows] == [
        ("contract", 1, 1),
        ("model_transport", 1, 0),
    ]
    assert rows[0]["example"] == {
        "label": "math-g7-g000001-r1-a1",
        "message": "It went wrong.",
    }


def test_a_poisoned_rollout_is_counted_under_both_names(engine: Engine):
    story = StoredRun(engine, prompts=1, n=1, max_lost=1)
    story.record(story.died(story.claim_one()))
    rows = transact(engine, lambda c: errors_by_class(c, story.run))
    assert {(row["error_class"], row["attempts"], row["rollouts"]) for row in rows} == {
        ("poison", 0, 1),
        ("worker_lost", 1, 0),
    }


def test_errors_by_worker_say_who_met_them(story: StoredRun):
    rows = transact(story.engine, lambda c: errors_by_worker(c, story.run))
    assert rows == [
        {"worker": "w1", "attempts": 4, "errors": 1, "by_class": {"model_transport": 1}},
        {"worker": "w2", "attempts": 1, "errors": 1, "by_class": {"contract": 1}},
    ]
