"""Results of remote attempts whose calls a gateway recorded: the trajectory has them all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fixtures.agentcore_runtime import make_buckets, set_environment
from fixtures.collectors import StoredCollector
from fixtures.stored_run import StoredRun
from sqlalchemy import text

from pipeline.agentcore.results import RemoteResults
from pipeline.collector import Collector
from pipeline.contract.agentcore import input_id_of, session_id_of
from pipeline.contract.errors import ErrorClass
from pipeline.contract.journal import pack_calls
from pipeline.contract.messages import JournalFrame
from pipeline.contract.model_call import ModelCall
from pipeline.contract.result_keys import rollout_key
from pipeline.contract.rollout import label_of
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.completions import Delivery
from pipeline.queue.journal_frames import check_out_frame
from pipeline.queue.payloads import open_payloads
from pipeline.store.engine import transact
from pipeline.store.remote_sessions import open_sessions
from pipeline.tokens.prompt_prefixes import PromptPrefixes
from pipeline.tokens.recorded_calls import recorded_call
from pipeline.tokens.token_body import unpack_tokens


class Remote:
    """A run of remote attempts, its bucket, and the services that take in its outcomes."""

    def __init__(self, engine, settings, buckets, **config):
        self.engine, self.settings, self.buckets = engine, settings, buckets
        target = {
            "target": "arn:aws:bedrock-agentcore:us-west-2:1:runtime/x",
            "results_bucket": buckets.bucket,
            "results_queue_url": buckets.queue_url,
        }
        self.story = StoredRun(engine, reward=None, agent="agentcore", agentcore=target, **config)
        self.results = RemoteResults(engine, open_payloads(settings), settings)
        unused: Any = None
        self._collector = Collector(
            engine, unused, settings, markers=unused, stop_attempts=lambda _: None
        )

    def claim(self):
        attempt = self.story.claim_one()
        transact(self.engine, lambda c: open_sessions(c, self.story.run, [attempt]))
        return attempt

    def label(self, attempt):
        run = self.story.run.slug
        return label_of(run, attempt.group_no, attempt.rollout_index, attempt.attempt_no)

    def frame(self, attempt, at, ids=(1, 2)):
        tokens = PromptPrefixes().add(0, ids, [9], [-0.5])
        call = ModelCall(sequence=0, trainable=True, policy_version=6, tokens=tokens)
        key = (attempt.attempt_no, at)
        body = pack_calls(
            [recorded_call(call, key, prefix=None, identity=str(at), supersedes=False)]
        )
        return JournalFrame(
            run_id=self.story.run.run_id,
            group_id=attempt.group_id,
            rollout_id=attempt.rollout_id,
            attempt_no=attempt.attempt_no,
            label=self.label(attempt),
            first=at,
            n_calls=1,
            body=body,
            body_bytes=len(body),
        )

    def collect(self, *frames):
        self._collector._take_in(Delivery(journal=list(frames)))

    def save(self, attempt, *, announce=True, result=None):
        session = session_id_of(self.label(attempt), attempt.rollout_id)
        run = self.story.run.slug
        key = rollout_key(run, input_id_of(attempt.group_no), session)
        body = json.dumps(result or {"rollout_data": [{}], "rewards": 1.0})
        self.buckets.client("s3").put_object(Bucket=self.buckets.bucket, Key=key, Body=body)
        if announce:
            record = {"s3": {"bucket": {"name": self.buckets.bucket}, "object": {"key": key}}}
            self.buckets.client("sqs").send_message(
                QueueUrl=self.buckets.queue_url, MessageBody=json.dumps({"Records": [record]})
            )

    def trajectory(self, attempt):
        (row,) = self.story.rows(
            "SELECT body, tokens FROM trajectories WHERE rollout_id = :id AND attempt_no = :no",
            id=attempt.rollout_id,
            no=attempt.attempt_no,
        )
        tokens: list[Any] = unpack_tokens(bytes(row["tokens"] or b""))
        return unpack_record(bytes(row["body"])), [call.prompt.tolist() for call in tokens]


@pytest.fixture
def remote(engine, make_settings, redis_place, aws_url):
    buckets = make_buckets(aws_url)
    gateway = {"gateway_url": "http://gateway/v1"}
    settings = make_settings(redis_place, agentcore=gateway, aws={"region": "us-west-2"})
    with set_environment(buckets.environment):
        made = Remote(engine, settings, buckets)
        yield made
        made.results.close()


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_result_waits_for_the_calls_that_were_recorded_before_it(
    remote, engine, is_announced, monkeypatch
):
    monkeypatch.setattr("pipeline.agentcore.results._SWEEP_ALONE_S", 0.0)
    if not is_announced:
        monkeypatch.setattr("pipeline.agentcore.results._SWEEP_S", 0.0)
    attempt, collector = remote.claim(), StoredCollector(engine)
    collector.catch_up()
    remote.save(attempt, announce=is_announced)
    remote.results.step()
    assert remote.story.states() == {"dispatched": 1}, "a collector may hold its calls"
    remote.collect(remote.frame(attempt, 7), remote.frame(attempt, 5, (1,)))
    collector.catch_up()
    remote.results.step()
    assert remote.story.states() == {"succeeded": 1}
    record, prompts = remote.trajectory(attempt)
    assert prompts == [[1], [1, 2]]
    assert [call.sequence for call in record.calls] == [0, 1]
    row = remote.story.attempt(attempt)
    assert (row["n_turns"], row["version_min"], row["version_max"]) == (2, 6, 6)
    assert remote.buckets.receive() == []


def test_calls_of_an_attempt_that_was_given_up_are_those_of_its_late_result(remote, engine):
    attempt = remote.claim()
    remote.story.record(remote.story.lost(attempt))
    remote.collect(remote.frame(attempt, 5))
    again = remote.claim()
    remote.collect(remote.frame(again, 6, (3,)))
    remote.save(attempt)
    remote.results.step()
    StoredCollector(engine).catch_up()
    remote.results.step()
    assert remote.story.rollout(attempt)["winner_attempt_no"] == 1
    assert remote.trajectory(attempt)[1] == [[1, 2]]


def test_calls_that_come_after_the_outcome_are_kept_as_a_dead_letter(remote):
    attempt = remote.claim()
    kept = remote.frame(attempt, 5)
    remote.collect(kept)
    remote.story.record(remote.story.succeeded(attempt))
    remote.collect(kept, remote.frame(attempt, 6))
    (letter,) = remote.story.rows("SELECT kind, rollout_id, reason, body FROM dead_letters")
    assert (letter["kind"], letter["rollout_id"]) == ("journal", attempt.rollout_id)
    assert "1 calls of" in letter["reason"]
    assert len(letter["body"]) > len(kept.body)


def test_calls_of_a_superseded_attempt_are_ignored(remote):
    attempt = remote.claim()
    remote.story.record(remote.story.lost(attempt))
    remote.story.record(remote.story.succeeded(remote.claim()))
    remote.collect(remote.frame(attempt, 5))
    assert remote.story.rows("SELECT * FROM journals") == []
    assert remote.story.rows("SELECT * FROM dead_letters") == []


def test_a_session_without_a_result_keeps_the_calls_that_it_made(remote, engine, monkeypatch):
    monkeypatch.setattr("pipeline.agentcore.results._SWEEP_S", 0.0)
    attempt = remote.claim()
    remote.collect(remote.frame(attempt, 5))
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE attempts SET phase = 'remote', state = 'running', lease_until = now()")
        )
    remote.results.step()
    row = remote.story.attempt(attempt)
    assert (row["state"], row["error_class"]) == ("timed_out", str(ErrorClass.AGENT_TIMEOUT))
    assert remote.trajectory(attempt)[1] == [[1, 2]]


def test_calls_whose_record_is_gone_are_counted_and_the_others_stay(remote, engine, caplog):
    attempt, payloads = remote.claim(), open_payloads(remote.settings)
    gone = check_out_frame(remote.frame(attempt, 5), payloads)
    referred = check_out_frame(remote.frame(attempt, 6, (4,)), payloads)
    remote.collect(gone.model_copy(update={"body_uri": f"{gone.body_uri}x"}), referred)
    remote.save(attempt)
    remote.results.step()
    StoredCollector(engine).catch_up()
    remote.results.step()
    record, prompts = remote.trajectory(attempt)
    assert (prompts, record.metadata["calls_missing"]) == ([[4]], 1)
    assert "are missing in its trajectory" in caplog.text
