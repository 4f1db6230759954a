"""Trajectories of remote sessions that wait for a reward of ours, in the store."""

from __future__ import annotations

from contextlib import closing

import pytest
from fixtures.collectors import StoredCollector
from fixtures.stored_run import StoredRun

from pipeline.contract.errors import ErrorClass
from pipeline.contract.rollout import RolloutState
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.store.accounting import check_accounting
from pipeline.store.engine import transact
from pipeline.store.operations import retry_rollouts
from pipeline.store.remote_sessions import attempts_named, count_sessions, open_sessions
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.rollouts import claim
from pipeline.store.status import run_status
from pipeline.store.unscored import read_unscored
from pipeline.trainer.client import TrainerClient

TARGET = {
    "target": "arn:aws:bedrock-agentcore:us-west-2:1:runtime/x",
    "results_bucket": "b",
    "session_timeout_s": 60.0,
}


class Story(StoredRun):
    """A run on AgentCore with a reward of ours."""

    def dispatch(self):
        (attempt,) = self.claim(1)
        transact(self.engine, lambda c: open_sessions(c, self.run, [attempt]))
        return attempt

    def unscored(self, attempt, **fields):
        return self.succeeded(attempt, None, purpose="unscored", tokens=b"ids", **fields)

    def check(self):
        assert transact(self.engine, lambda c: check_accounting(c, self.run.run_id)) == []


@pytest.fixture
def story(engine):
    made = Story(engine, agent="agentcore", agentcore=TARGET, on_error={"reward_error": "retry"})
    yield made
    made.check()


def key(attempt):
    return attempt.rollout_id, attempt.attempt_no


def test_a_result_without_its_reward_is_scored_by_the_next_attempt_without_a_session(engine, story):
    StoredCollector(engine).report(max_sessions=1)
    session = story.dispatch()
    left = story.unscored(session, n_turns=2)
    story.record(left)
    row = story.rollout(session)
    assert (row["state"], row["reward"], row["unscored_no"]) == ("queued", None, 1)
    assert story.attempt(session)["state"] == "succeeded"
    assert transact(engine, lambda c: attempts_named(c, [key(session)])) == [], "it is taken in"
    told = transact(engine, run_status, story.run).waits
    assert any(each.startswith("1 rollout waits for its reward") for each in told), told
    with closing(TrainerClient(engine, run=story.run.slug)) as trainer, pytest.raises(NotReady):
        trainer.pull(0, BatchSpec(groups=1))

    scoring = story.dispatch()
    assert (scoring.attempt_no, scoring.unscored_no) == (2, 1)
    assert transact(engine, count_sessions) == 1, "only the session's"
    (found,) = transact(engine, lambda c: read_unscored(c, [key(session)])).values()
    same = ("label", "body", "body_digest", "tokens", "n_turns", "prompt_tokens", "version_max")
    assert [getattr(found, name) for name in same] == [getattr(left, name) for name in same]

    story.record(story.succeeded(scoring, 0.5, tokens=b"ids"))
    row = story.rollout(session)
    assert (row["reward"], row["attempts_used"], row["winner_attempt_no"]) == (0.5, 1, 2)
    kept = story.rows("SELECT attempt_no FROM trajectories")
    assert [each["attempt_no"] for each in kept] == [2], "it is stored once"


def test_the_same_result_again_changes_nothing(story):
    left = story.unscored(story.dispatch())
    story.record(left)
    before = story.everything()
    assert story.record(left).duplicate == 1
    assert story.everything() == before


@pytest.mark.parametrize("error_class", [ErrorClass.WORKER_LOST, ErrorClass.REWARD_ERROR])
def test_scoring_that_was_lost_or_failed_is_done_again_without_a_session(
    engine, story, error_class
):
    story.record(story.unscored(story.dispatch()))
    story.record(story.failed(story.dispatch(), error_class, body=b""))
    again = story.dispatch()
    assert (again.attempt_no, again.unscored_no) == (3, 1)
    assert transact(engine, count_sessions) == 1
    story.record(story.succeeded(again, 0.25))
    assert story.states() == {"succeeded": 1}


def test_the_late_result_of_a_lost_attempt_counts_and_ends_the_newer_one(story):
    lost = story.dispatch()
    story.record(story.lost(lost))
    newer = story.dispatch()
    story.record(story.unscored(lost))
    assert story.attempt(newer)["state"] == "superseded"
    assert story.rollout(lost)["unscored_no"] == 1
    late = story.dispatch()
    assert (late.attempt_no, late.unscored_no) == (3, 1)
    assert story.record(story.unscored(newer)).duplicate == 1
    story.record(story.succeeded(late, 1.0))


def test_the_late_result_of_a_queued_rollout_counts(story):
    lost = story.dispatch()
    story.record(story.lost(lost))
    story.record(story.unscored(lost))
    assert story.dispatch().unscored_no == 1


def test_an_operators_retry_runs_the_agent_again(engine, story):
    story.record(story.unscored(story.dispatch()))
    story.record(story.failed(story.dispatch(), ErrorClass.CONTRACT))
    assert story.states() == {"failed": 1}
    everything = RolloutFilter()
    transact(engine, lambda c: retry_rollouts(c, story.run, everything, state=RolloutState.FAILED))
    assert story.dispatch().unscored_no is None


def test_only_rollouts_that_wait_for_their_reward_can_be_claimed(engine):
    story = Story(engine, prompts=3, agent="agentcore", agentcore=TARGET)
    first, second = story.dispatch(), story.dispatch()
    story.record(story.unscored(second))

    def claim_unscored(connection):
        return claim(connection, story.run, most=10, lease_s=60.0, unscored=True)

    (claimed,) = transact(engine, claim_unscored)
    assert (claimed.rollout_id, claimed.unscored_no) == (second.rollout_id, 1)
    assert transact(engine, claim_unscored) == []
    story.record(story.unscored(first))
    story.check()
