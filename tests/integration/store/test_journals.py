"""Journals in the store: fenced, idempotent, carried by the next request, gone at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.brokers import BrokerPlace
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.attachments import Attachments
from pipeline.collector import Collector
from pipeline.contract.errors import ErrorClass, ServiceUnavailable
from pipeline.contract.journal import RecordedCall, pack_calls
from pipeline.contract.messages import JournalFrame, RolloutRequest
from pipeline.contract.rollout import RolloutState, label_of
from pipeline.queue.broker import broker_of
from pipeline.queue.completions import Delivery
from pipeline.queue.journal_frames import check_out_frame, read_journal
from pipeline.queue.payloads import FolderPayloads, open_payloads
from pipeline.reconciler import Reconciler
from pipeline.requests import request_of
from pipeline.settings import Settings
from pipeline.store.engine import transact
from pipeline.store.journals import add_frames
from pipeline.store.operations import begin_cancel, cancel_rollouts, retry_rollouts
from pipeline.store.removal import begin_removal, remove_groups
from pipeline.store.rollout_filter import RolloutFilter
from pipeline.store.rollouts import ClaimedAttempt


@pytest.fixture
def settings(redis_place: BrokerPlace, make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(redis_place, lease={"poll_s": 0.01})


class Journaled:
    """A run whose attempts record calls, in a store with a payload folder."""

    def __init__(self, engine: Engine, settings: Settings, **config: Any) -> None:
        self.engine = engine
        self.settings = settings
        self.story = StoredRun(engine, **config)
        self.payloads = open_payloads(settings)

    def frame(
        self, attempt: ClaimedAttempt, first: int = 0, *, text: str = "4", **fields: Any
    ) -> JournalFrame:
        call = RecordedCall((attempt.attempt_no, first), f"{first:032x}", {"text": text})
        body = pack_calls([call])
        label = label_of(
            self.story.run.slug, attempt.group_no, attempt.rollout_index, attempt.attempt_no
        )
        values: dict[str, Any] = {
            "run_id": self.story.run.run_id,
            "group_id": attempt.group_id,
            "rollout_id": attempt.rollout_id,
            "attempt_no": attempt.attempt_no,
            "label": label,
            "first": first,
            "n_calls": 1,
            "body": body,
            "body_bytes": len(body),
        }
        return JournalFrame(**(values | fields))

    def keep(self, *frames: JournalFrame) -> int:
        return transact(self.engine, lambda c: add_frames(c, frames))

    def kept(self) -> list[tuple[int, int]]:
        rows = self.story.rows("SELECT attempt_no, first_call FROM journals ORDER BY 1, 2")
        return [(row["attempt_no"], row["first_call"]) for row in rows]

    def next_request(self, settings: Settings | None = None) -> RolloutRequest:
        request = request_of(self.story.run, self.story.claim_one())
        (attached,) = Attachments(self.engine, settings or self.settings).attach([request])
        return attached

    def carried(self, request: RolloutRequest) -> list[tuple[int, int]]:
        return [call.key for call in read_journal(request, self.payloads).calls]

    def reconcile(self) -> None:
        reconciler = Reconciler(self.engine, broker_of(self.settings), self.payloads, self.settings)
        try:
            reconciler.step()
        finally:
            reconciler.close()


@pytest.fixture
def journaled(engine: Engine, settings: Settings) -> Journaled:
    return Journaled(engine, settings)


def test_frames_are_stored_once_in_whatever_order_they_come(journaled: Journaled) -> None:
    attempt = journaled.story.claim_one()
    first, second = journaled.frame(attempt, 0), journaled.frame(attempt, 1)
    assert journaled.keep(second) == 1
    assert journaled.keep(second, first, first) == 1
    assert journaled.kept() == [(1, 0), (1, 1)]


def test_frames_of_ended_and_superseded_attempts_are_ignored(journaled: Journaled) -> None:
    story = journaled.story
    first = story.claim_one()
    story.record(story.lost(first))
    assert journaled.keep(journaled.frame(first)) == 0
    second = story.claim_one()
    assert journaled.keep(journaled.frame(first), journaled.frame(second)) == 1
    story.record(story.succeeded(second))
    assert journaled.keep(journaled.frame(second, 1)) == 0
    assert journaled.kept() == [(2, 0)]


def test_frames_of_unknown_rollouts_are_ignored(journaled: Journaled, engine: Engine) -> None:
    attempt = journaled.story.claim_one()
    assert journaled.keep(journaled.frame(attempt, attempt_no=7)) == 0


def test_the_next_request_carries_what_all_earlier_attempts_recorded(journaled: Journaled) -> None:
    story = journaled.story
    attempt = story.claim_one()
    journaled.keep(journaled.frame(attempt, 1), journaled.frame(attempt, 0))
    story.record(story.lost(attempt))
    second = journaled.next_request()
    assert journaled.carried(second) == [(1, 0), (1, 1)]
    again = attempt._replace(attempt_no=2)
    journaled.keep(journaled.frame(again, 0))
    story.record(story.failed(again, ErrorClass.WORKER_STOPPED))
    assert journaled.carried(journaled.next_request()) == [(1, 0), (1, 1), (2, 0)]


def test_an_error_of_the_agents_own_starts_afresh(journaled: Journaled) -> None:
    story = journaled.story
    attempt = story.claim_one()
    journaled.keep(journaled.frame(attempt))
    story.record(story.failed(attempt, ErrorClass.AGENT_BUG))
    request = journaled.next_request()
    assert (request.journal, request.journal_uri) == ("", None)


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_long_journal_travels_by_reference(journaled: Journaled, by_reference: bool) -> None:
    story = journaled.story
    attempt = story.claim_one()
    texts = (f"{number}" * 7919 for number in range(60)) if not by_reference else ("4",) * 60
    frames = [
        journaled.frame(attempt, number, text=text, body_bytes=1000)
        for number, text in enumerate(texts)
    ]
    if by_reference:
        frames = [check_out_frame(frame, journaled.payloads) for frame in frames]
    journaled.keep(*frames)
    story.record(story.lost(attempt))
    request = journaled.next_request()
    assert request.journal == ""
    assert request.journal_uri is not None
    assert journaled.carried(request) == [(1, number) for number in range(60)]


def test_on_sqs_a_journal_always_travels_by_reference(
    journaled: Journaled, make_settings: Callable[..., Settings]
) -> None:
    story = journaled.story
    attempt = story.claim_one()
    journaled.keep(journaled.frame(attempt))
    story.record(story.lost(attempt))
    sqs = make_settings(broker={"url": "sqs://a:b@"})
    request = journaled.next_request(sqs)
    assert request.journal == ""
    assert request.journal_uri is not None


def test_without_the_payload_store_the_attempt_starts_afresh(
    journaled: Journaled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> str:
        raise ServiceUnavailable("The disk is full.")

    monkeypatch.setattr(FolderPayloads, "put", refuse)
    story = journaled.story
    attempt = story.claim_one()
    journaled.keep(journaled.frame(attempt, body_bytes=10**6))
    story.record(story.lost(attempt))
    assert journaled.next_request().journal_uri is None
    assert "starts afresh, without its journal: The disk is full." in caplog.text


def test_the_reconciler_deletes_the_journals_of_ended_rollouts(
    engine: Engine, settings: Settings
) -> None:
    case = Journaled(engine, settings, prompts=4, n=1)
    story = case.story
    done, failed, running, referred = story.claim()
    case.keep(*(case.frame(attempt) for attempt in (done, failed, running)))
    case.keep(check_out_frame(case.frame(referred), case.payloads))
    objects = Path(settings.data_dir, "payloads", str(story.run.run_id), "journals")
    assert len(list(objects.iterdir())) == 1
    story.record(story.succeeded(done), story.succeeded(referred))
    story.record(story.failed(failed, ErrorClass.CONTRACT))
    case.reconcile()
    rows = story.rows("SELECT rollout_id FROM journals")
    assert [row["rollout_id"] for row in rows] == [running.rollout_id]
    assert list(objects.iterdir()) == []


def test_an_operators_retry_starts_afresh(journaled: Journaled) -> None:
    story = journaled.story
    attempt = story.claim_one()
    journaled.keep(journaled.frame(attempt))
    transact(journaled.engine, lambda c: begin_cancel(c, story.run))
    transact(journaled.engine, lambda c: cancel_rollouts(c, story.run))
    everything = RolloutFilter("true", {})
    count = transact(
        journaled.engine,
        lambda c: retry_rollouts(c, story.run, everything, state=RolloutState.CANCELLED),
    )
    assert count.allowed == 1
    assert journaled.kept() == []
    assert journaled.next_request().journal == ""


def test_the_removal_of_a_run_removes_its_journals(journaled: Journaled) -> None:
    story = journaled.story
    attempt = story.claim_one()
    journaled.keep(journaled.frame(attempt))
    transact(journaled.engine, lambda c: begin_cancel(c, story.run))
    transact(journaled.engine, lambda c: cancel_rollouts(c, story.run))
    transact(journaled.engine, lambda c: begin_removal(c, story.run))
    transact(journaled.engine, lambda c: remove_groups(c, story.run))
    assert journaled.kept() == []


def test_a_frame_in_one_delivery_with_its_attempts_end_is_kept(journaled: Journaled) -> None:
    """A worker sends what it has recorded, and then that it stops."""
    story = journaled.story
    attempt = story.claim_one()
    take_in(journaled, journaled.frame(attempt), story.failed(attempt, ErrorClass.WORKER_STOPPED))
    assert story.states() == {"queued": 1}
    assert journaled.carried(journaled.next_request()) == [(1, 0)]


def test_a_frame_that_the_store_refuses_harms_nothing_beside_it(journaled: Journaled) -> None:
    story = journaled.story
    attempt = story.claim_one()
    refused = journaled.frame(attempt, body_uri="\0")
    take_in(journaled, refused, story.succeeded(attempt))
    assert story.states() == {"succeeded": 1}
    assert [row["kind"] for row in story.rows("SELECT kind FROM dead_letters")] == ["journal"]


def take_in(journaled: Journaled, frame: JournalFrame, completion: Any) -> None:
    unused: Any = None
    collector = Collector(
        journaled.engine,
        unused,
        journaled.settings,
        markers=unused,
        stop_attempts=lambda _: None,
    )
    collector._take_in(Delivery(journal=[frame], completions=[completion]))
