"""Dead letters: what comes to lie there, what its neighbours notice, and the ways out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pipeline import retry
from pipeline.collector import Collector
from pipeline.contract.errors import ErrorClass, StoreUnavailable
from pipeline.contract.messages import Completion, Heartbeat, RewardPart
from pipeline.queue.completions import Delivery
from pipeline.queue.frames import decode_completions, encode_completions

Cli = Callable[..., Any]


class DeliveredOnce:
    """A consumer with one delivery, and what was done with it."""

    hides_s = 0.0

    def __init__(self, *frames: bytes, beats: tuple[Heartbeat, ...] = ()) -> None:
        self.delivery = Delivery(messages=[object()], heartbeats=list(beats))  # pyright: ignore[reportArgumentType]
        for frame in frames:
            good, bad = decode_completions(frame)
            self.delivery.completions += good
            self.delivery.malformed += [("completion", item.reason, item.raw) for item in bad]
        self.acknowledged = False

    def receive(self, **_: Any) -> Delivery:
        return self.delivery

    def ack(self, delivery: Delivery) -> None:
        self.acknowledged = True

    def receive_sent(self) -> None:
        pass


@pytest.fixture
def make_collector(make_settings: Any) -> Callable[..., tuple[Collector, DeliveredOnce]]:
    """Make a collector for frames as they would come over a broker."""

    def make(story: StoredRun, *frames: bytes, **more: Any) -> tuple[Collector, DeliveredOnce]:
        consumer = DeliveredOnce(*frames, **more)
        collector = Collector(
            story.engine,
            consumer,  # pyright: ignore[reportArgumentType]
            make_settings(),
            markers=NoMarkers(),  # pyright: ignore[reportArgumentType]
            stop_attempts=lambda _: None,
        )
        return collector, consumer

    return make


class NoMarkers:
    """A sender of markers whose broker takes them and brings none."""

    is_sending = False
    delay_s = 0.0

    def send(self, markers: Any) -> None:
        pass


@pytest.fixture
def collect(make_collector: Any) -> Callable[..., DeliveredOnce]:
    """Let a collector take in frames."""

    def take_in(story: StoredRun, *frames: bytes, **more: Any) -> DeliveredOnce:
        collector, consumer = make_collector(story, *frames, **more)
        collector.step()
        return consumer

    return take_in


def letters(cli: Cli, *options: str) -> list[dict[str, Any]]:
    return cli("dlq", "list", *options)["dead_letters"]


def poisoned(tell: Callable[..., StoredRun]) -> StoredRun:
    story = tell(max_lost=1)
    story.record(story.died(story.claim_one()))
    return story


def of_the_future(completion: Completion) -> bytes:
    return encode_completions([completion.model_copy(update={"schema_version": 2})])


def test_a_poison_rollout_is_listed_with_its_label(tell, cli):
    story = poisoned(tell)
    (letter,) = letters(cli)
    assert (letter["kind"], letter["run"], letter["reason"]) == (
        "rollout",
        story.run.slug,
        "poison",
    )
    assert letter["label"] == f"{story.run.slug}-g000000-r0-a1"


def test_a_requeued_rollout_has_its_whole_budget_again(tell, cli):
    story = poisoned(tell)
    (letter,) = letters(cli)
    assert cli("dlq", "requeue", str(letter["id"]), "--yes")["requeued"][0]["result"] == (
        "queued again"
    )
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["error_class"]) == ("queued", None)
    assert rollout["lost_count"] == rollout["died_count"] == 0
    assert story.groups()[0]["state"] == "open"
    assert letters(cli) == []
    (letter,) = letters(cli, "--redriven")
    assert letter["redriven_at"] is not None
    story.record(story.succeeded(story.claim_one()))
    assert story.groups()[0]["state"] == "ready"


def test_a_rollout_that_went_on_is_not_requeued(tell, cli):
    poisoned(tell)
    (letter,) = letters(cli)
    cli("dlq", "requeue", str(letter["id"]), "--yes")
    error = cli("dlq", "requeue", str(letter["id"]), "--yes", code=7)["error"]
    assert "is no longer failed" in error["message"]


def test_a_message_of_the_future_is_kept_and_its_neighbours_are_recorded(tell, collect, cli):
    story = tell(prompts=3)
    first, second, third = story.claim()
    consumer = collect(
        story,
        encode_completions([story.succeeded(first)]),
        of_the_future(story.succeeded(second)),
        encode_completions([story.succeeded(third)]),
    )
    assert consumer.acknowledged
    assert story.states() == {"succeeded": 2, "dispatched": 1}
    (letter,) = letters(cli, "--kind", "completion")
    assert "schema 2" in letter["reason"]
    shown = cli("dlq", "show", str(letter["id"]))
    assert story.run.slug in shown["body"]


def test_a_completion_that_can_be_read_by_now_is_recorded(tell, collect, cli, monkeypatch):
    story = tell()
    attempt = story.claim_one()
    collect(story, of_the_future(story.succeeded(attempt)))
    (letter,) = letters(cli)
    error = cli("dlq", "requeue", str(letter["id"]), "--yes", code=1)["error"]
    assert "schema 2" in error["message"]
    monkeypatch.setattr("pipeline.contract.messages.SCHEMA", 2)
    assert cli("dlq", "requeue", "--all", "--yes")["requeued"][0]["result"] == "recorded"
    assert story.states() == {"succeeded": 1}
    assert len(story.rows("SELECT * FROM trajectories")) == 1


def test_a_completion_of_an_attempt_nobody_dispatched_is_kept_whole(tell, collect, cli):
    story = tell()
    attempt = story.claim_one()
    stranger = story.succeeded(attempt).model_copy(update={"attempt_no": 7})
    collect(story, encode_completions([stranger]))
    (letter,) = letters(cli)
    assert "never dispatched" in letter["reason"]
    assert (
        "never dispatched"
        in cli("dlq", "requeue", str(letter["id"]), "--yes", code=7)["error"]["message"]
    )
    assert story.states() == {"dispatched": 1}


def test_what_the_store_refuses_takes_no_neighbour_with_it(tell, collect, cli):
    story = tell(prompts=3)
    first, second, third = story.claim()
    refused = story.succeeded(second, reward_parts=(RewardPart(name="a\0b", value=1.0),))
    consumer = collect(
        story, encode_completions([story.succeeded(first), refused, story.succeeded(third)])
    )
    assert consumer.acknowledged
    assert story.states() == {"succeeded": 2, "dispatched": 1}
    (letter,) = letters(cli)
    assert "The store refused it" in letter["reason"]


def test_a_message_that_nobody_can_take_in_does_not_come_for_ever(tell, collect, cli, monkeypatch):
    """Whatever is wrong with one message, in us or in it, its neighbours are recorded."""
    story = tell(prompts=3)
    first, second, third = story.claim()
    decide = retry.decide_after

    def decide_or_fail(rollout: retry.Rollout, completion: Completion, **options: Any) -> Any:
        if completion.rollout_id == second.rollout_id:
            raise OverflowError("date value out of range")
        return decide(rollout, completion, **options)

    said = [story.succeeded(attempt) for attempt in (first, second, third)]
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.store.outcomes.decide_after", decide_or_fail)
        assert collect(story, encode_completions(said)).acknowledged
    assert story.states() == {"succeeded": 2, "dispatched": 1}
    (letter,) = letters(cli)
    assert "date value out of range" in letter["reason"]
    assert cli("dlq", "requeue", "--all", "--yes")["requeued"][0]["result"] == "recorded"
    assert story.states() == {"succeeded": 3}


@pytest.fixture
def fail_on_parts(engine: Engine) -> Callable[..., None]:
    """Let Postgres refuse every reward part that is named `bad`, with an SQLSTATE."""

    def install(sqlstate: str) -> None:
        with engine.begin() as connection:
            connection.execute(
                text(f"""
                    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                    BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{sqlstate}'; END $$
                """)
            )
            connection.execute(
                text(
                    "CREATE TRIGGER refuse BEFORE INSERT ON rewards FOR EACH ROW"
                    " WHEN (NEW.name = 'bad') EXECUTE FUNCTION refuse()"
                )
            )

    return install


BAD = (RewardPart(name="bad", value=1.0),)


@pytest.mark.parametrize("sqlstate", ["21000", "22003", "23514", "54000"])
def test_an_error_of_the_data_concerns_its_message_alone(
    tell, collect, cli, fail_on_parts, sqlstate
):
    fail_on_parts(sqlstate)
    story = tell(prompts=2)
    first, second = story.claim()
    said = [story.succeeded(first, reward_parts=BAD), story.succeeded(second)]
    assert collect(story, encode_completions(said)).acknowledged
    assert story.states() == {"succeeded": 1, "dispatched": 1}
    (letter,) = letters(cli)
    assert letter["reason"] == "The store refused it: refused"


@pytest.mark.parametrize("sqlstate", ["08006", "25006", "42501", "53100", "57P01", "58030"])
def test_an_error_of_the_store_puts_no_message_aside(
    tell, make_collector, cli, fail_on_parts, sqlstate
):
    fail_on_parts(sqlstate)
    story = tell(prompts=2)
    first, second = story.claim()
    said = [story.succeeded(first, reward_parts=BAD), story.succeeded(second)]
    collector, consumer = make_collector(story, encode_completions(said))
    for _ in range(12):
        with pytest.raises((StoreUnavailable, DBAPIError)):
            collector.step()
    assert (letters(cli), story.states()) == ([], {"dispatched": 2})
    assert not consumer.acknowledged


@pytest.mark.parametrize("sqlstate", ["XX000", "53200", "57014", "P0001"])
def test_a_message_that_fails_in_one_way_each_time_lets_its_neighbours_pass(
    tell, make_collector, cli, fail_on_parts, sqlstate
):
    fail_on_parts(sqlstate)
    story = tell(prompts=2)
    first, second = story.claim()
    said = [story.succeeded(first, reward_parts=BAD), story.succeeded(second)]
    collector, consumer = make_collector(story, encode_completions(said))
    for _ in range(4):
        with pytest.raises((StoreUnavailable, DBAPIError)):
            collector.step()
    assert story.states() == {"dispatched": 2}
    collector.step()
    assert consumer.acknowledged
    assert story.states() == {"succeeded": 1, "dispatched": 1}
    (letter,) = letters(cli)
    assert letter["reason"] == "The store refused it: refused"


def test_a_name_too_long_for_the_store_concerns_its_message_alone(tell, collect, cli):
    story = tell(prompts=2)
    first, second = story.claim()
    # Not compressible: Postgres compresses a key before it rejects its length.
    name = "".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(100))
    part = BAD[0].model_copy(update={"name": name})
    said = [story.succeeded(first, reward_parts=(part,)), story.succeeded(second)]
    assert collect(story, encode_completions(said)).acknowledged
    assert story.states() == {"succeeded": 1, "dispatched": 1}
    (letter,) = letters(cli)
    assert "reward_parts.0.name" in letter["reason"]


@pytest.mark.parametrize("error", [MemoryError(), PoolTimeout("pool"), OSError("disk")], ids=repr)
def test_what_is_no_fault_of_the_messages_puts_none_aside(tell, collect, cli, monkeypatch, error):
    story = tell(prompts=2)
    said = [story.succeeded(attempt) for attempt in story.claim()]

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.store.outcomes.decide_after", fail)
        with pytest.raises(type(error)):
            collect(story, encode_completions(said))
    assert (letters(cli), story.states()) == ([], {"dispatched": 2})
    assert collect(story, encode_completions(said)).acknowledged
    assert story.states() == {"succeeded": 2}


def test_a_dry_run_changes_nothing(tell, cli):
    story = poisoned(tell)
    (letter,) = letters(cli)
    assert cli("dlq", "requeue", "--all", "--dry-run")["requeued"][0]["result"] == "would be tried"
    assert cli("dlq", "drop", "--all", "--dry-run")["dropped"] == [letter["id"]]
    assert (letters(cli), story.states()) == ([letter], {"failed": 1})


def test_nothing_is_requeued_or_dropped_unless_somebody_says_yes(tell, cli):
    poisoned(tell)
    for command in ("requeue", "drop"):
        assert cli("dlq", command, "--all", code=7)["error"]["code"] == "E131"
    assert len(letters(cli)) == 1


def test_dropped_letters_are_gone_and_their_rollouts_stay(tell, cli):
    story = poisoned(tell)
    assert len(cli("dlq", "drop", "--all", "--yes")["dropped"]) == 1
    assert (letters(cli, "--redriven"), story.states()) == ([], {"failed": 1})


def test_one_that_fails_again_does_not_hold_up_the_others(tell, collect, cli):
    story = poisoned(tell)
    other = tell()
    collect(other, of_the_future(other.succeeded(other.claim_one())))
    results = [r["result"] for r in cli("dlq", "requeue", "--all", "--yes")["requeued"]]
    assert sorted(results)[1] == "queued again"
    assert "schema 2" in sorted(results)[0]
    assert story.states() == {"queued": 1}


def test_letters_must_be_named_one_way(tell, cli):
    assert cli("dlq", "drop", code=2)["error"]["code"] == "E104"
    assert cli("dlq", "drop", "3", "--all", code=2)["error"]["code"] == "E104"
    assert cli("dlq", "show", "99", code=2)["error"]["code"] == "E120"


def test_a_poison_letter_is_written_once(tell):
    story = poisoned(tell)
    (rollout,) = story.rollouts()
    assert rollout["error_class"] == ErrorClass.POISON
    assert len(story.rows("SELECT * FROM dead_letters")) == 1
