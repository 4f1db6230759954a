"""An outcome whose message was lost is taken from the payload store before its work is repeated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.collectors import StoredCollector
from fixtures.stored_run import StoredRun
from fixtures.watched_payloads import WatchedPayloads
from sqlalchemy import Engine, text

from pipeline.contract.messages import Completion
from pipeline.contract.trajectory import unpack_record
from pipeline.queue.broker import broker_of
from pipeline.queue.claim_checks import check_out, load_body
from pipeline.queue.frames import encode_completions
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.reconciler import Reconciler
from pipeline.store.engine import transact


class Judged:
    """A run of which every attempt has been silent for long, and a reconciler to judge it."""

    def __init__(self, engine: Engine, settings: Any, *, prompts: int) -> None:
        self.payloads: PayloadStore = open_payloads(settings)
        self.story = StoredRun(engine, prompts=prompts)
        self.attempts = self.story.claim()
        self.story.beat(*self.attempts)
        transact(engine, lambda c: c.execute(text("UPDATE attempts SET lease_until = 'epoch'")))
        StoredCollector(engine).catch_up()
        self.reconciler = Reconciler(engine, broker_of(settings), self.payloads, settings)

    def leave(self, number: int, **fields: Any) -> Completion:
        """Leave the object of an attempt, as its worker does before it sends the message."""
        return check_out(self.story.succeeded(self.attempts[number], **fields), self.payloads)

    def judge(self) -> None:
        try:
            self.reconciler.step()
        finally:
            self.reconciler.close()


@pytest.fixture
def judged(
    engine: Engine, redis_place: BrokerPlace, make_settings: Callable[..., Any]
) -> Callable[..., Judged]:
    def make(*, mode: str = "object", prompts: int = 1, **sections: Any) -> Judged:
        sections = {"payloads": {"mode": mode}, "lease": {"poll_s": 0.01}, **sections}
        return Judged(engine, make_settings(redis_place, **sections), prompts=prompts)

    return make


def test_what_reached_the_payload_store_is_not_done_again(judged):
    case = judged(prompts=2)
    said = case.leave(0, reward=0.5)
    case.judge()
    first, second = case.story.rollouts()
    assert (first["state"], first["reward"], first["attempt_no"]) == ("succeeded", 0.5, 1)
    assert (second["state"], second["attempt_no"]) == ("queued", 1)
    (kept,) = case.story.rows("SELECT body, body_uri, body_digest FROM trajectories")
    assert (kept["body"], kept["body_uri"]) == (None, said.body_uri)
    record = unpack_record(load_body(kept["body_uri"], kept["body_digest"], case.payloads))
    assert record.messages[-1]["content"] == "7"


def test_no_transaction_is_open_while_objects_are_looked_for(judged, engine):
    case = judged(prompts=2)
    case.leave(0)
    case.payloads = case.reconciler._payloads = WatchedPayloads(
        Path(urlsplit(case.payloads.uri("")).path), engine
    )
    case.judge()
    assert case.payloads.reads >= 4
    assert case.story.states() == {"succeeded": 1, "queued": 1}


def test_an_attempt_that_is_heard_of_during_the_search_is_not_given_up(judged):
    case = judged(prompts=2)
    find = case.payloads.find

    def hear_meanwhile(prefix: str) -> Any:
        case.story.beat(case.attempts[0])
        return find(prefix)

    case.payloads.find = hear_meanwhile
    case.judge()
    assert [row["state"] for row in case.story.rollouts()] == ["running", "queued"]


def test_the_message_that_comes_after_all_changes_nothing(judged):
    case = judged()
    said = case.leave(0)
    case.judge()
    before = case.story.everything()
    assert case.story.record(said).duplicate == 1
    assert case.story.everything() == before


def test_a_bad_object_holds_up_nobody(judged):
    """What is not the outcome of this very attempt is left alone, and the rest is judged."""
    case = judged(prompts=4)
    paths = [case.leave(number).body_uri.removeprefix("file://") for number in (0, 1, 2)]
    whole, cut, other = paths
    with open(cut, "r+b") as file:
        file.truncate(20)
    shutil.copy(whole, other)
    case.judge()
    assert [row["state"] for row in case.story.rollouts()] == [
        "succeeded",
        "queued",
        "queued",
        "queued",
    ]


def test_without_that_mode_nothing_is_looked_for(judged):
    case = judged(mode="inline")
    case.leave(0)
    case.judge()
    assert case.story.states() == {"queued": 1}


def test_an_object_that_is_not_signed_with_our_key_is_no_outcome(judged):
    case = judged(broker={"signing_key": "a key that all processes share"})
    said = case.leave(0, reward=1.0)
    path = said.body_uri.removeprefix("file://")
    with open(path, "r+b") as file:
        file.seek(10)
        file.write(b"forged")
    case.judge()
    assert case.story.states() == {"queued": 1}


def test_of_an_attempt_that_was_executed_twice_an_object_that_can_be_read_is_taken(judged):
    case = judged()
    bodies = [b"one execution", b"another"]
    said = sorted((case.leave(0, body=body) for body in bodies), key=lambda each: each.body_uri)
    with open(said[0].body_uri.removeprefix("file://"), "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"bad")
    case.judge()
    (kept,) = case.story.rows("SELECT body_uri, body_digest FROM trajectories")
    assert kept == {"body_uri": said[1].body_uri, "body_digest": said[1].body_digest}


def test_an_object_of_the_version_before_is_found_too(judged):
    case = judged()
    whole = case.story.succeeded(case.attempts[0], reward=0.5, body_digest=None)
    key = f"{whole.run_id}/{whole.label}.frame"
    uri = case.payloads.uri(key)
    claimed = whole.model_copy(update={"body_uri": uri})
    case.payloads.put(key, encode_completions([claimed]))
    case.judge()
    assert case.story.states() == {"succeeded": 1}
    (kept,) = case.story.rows("SELECT body_uri, body_digest FROM trajectories")
    assert kept == {"body_uri": uri, "body_digest": None}
    assert load_body(uri, None, case.payloads) == whole.body
