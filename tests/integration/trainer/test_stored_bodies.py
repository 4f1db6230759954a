"""The trajectories that readers get: those of the execution whose reward was accepted."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from fixtures.watched_payloads import WatchedPayloads
from sqlalchemy import Engine, text

from pipeline.contract.errors import NotAllowed, ServiceUnavailable, UnreadableBody
from pipeline.contract.messages import Completion
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.contract.trajectory import TrajectoryRecord, pack_record
from pipeline.queue.claim_checks import check_out
from pipeline.queue.frames import decode_completions, encode_completions
from pipeline.queue.payloads import FolderPayloads
from pipeline.redrive import redrive
from pipeline.store.accounting import check_accounting
from pipeline.store.dead_letters import DeadLetter, list_dead_letters
from pipeline.store.dropped_groups import drop_group
from pipeline.store.engine import transact
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.export import export_lines
from pipeline.trainer.train_batch import TrainBatch

ONE = BatchSpec(groups=1, min_group_size=1)
TWO = BatchSpec(groups=2, min_group_size=1)


class StoredBodies:
    """A run whose trajectories lie in a payload store."""

    def __init__(self, engine: Engine, folder: Path, *, prompts: int) -> None:
        self.payloads = FolderPayloads(folder)
        self.story = StoredRun(engine, prompts=prompts, n=1, n_min=1)

    def execute(self, attempt: ClaimedAttempt, answer: str, **fields: Any) -> Completion:
        """Return the completion of one execution, after its body was written."""
        body = pack_record(TrajectoryRecord(messages=[{"role": "assistant", "content": answer}]))
        completion = self.story.succeeded(attempt, body=body, body_bytes=len(body), **fields)
        return check_out(completion, self.payloads)

    def connect(self, consumer: str = "a") -> TrainerClient:
        return TrainerClient(
            self.story.engine, run=self.story.run.slug, consumer=consumer, payloads=self.payloads
        )

    def finish(self) -> None:
        """Execute every rollout; each answers with the number of its group."""
        for attempt in self.story.claim():
            self.story.record(self.execute(attempt, f"answer {attempt.group_no}"))

    def path(self, group_no: int) -> Path:
        """Return the file with the trajectory of a group's rollout."""
        query = """
            SELECT body_uri FROM trajectories JOIN rollouts USING (rollout_id)
            WHERE run_id = :run_id AND group_no = :group_no
        """
        (row,) = self.story.rows(query, group_no=group_no)
        return Path(row["body_uri"].removeprefix("file://"))

    def states(self) -> list[str]:
        return [group["drop_reason"] or group["state"] for group in self.story.groups()]

    def letters(self) -> list[DeadLetter]:
        return transact(
            self.story.engine, lambda c: list_dead_letters(c, run_id=self.story.run.run_id)
        )


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])


def swap(path: Path) -> None:
    (completion,), _ = decode_completions(path.read_bytes())
    path.write_bytes(encode_completions([completion.model_copy(update={"body": b"other"})]))


def texts(batch: TrainBatch) -> list[str]:
    return [rollout.messages[0]["content"] for rollout in batch.rollouts()]


@pytest.fixture
def make(engine: Engine, tmp_path: Path) -> Iterator[Callable[[int], StoredBodies]]:
    """Runs with groups of one rollout; the books balance in the end."""
    made: list[StoredBodies] = []

    def make(prompts: int) -> StoredBodies:
        made.append(StoredBodies(engine, tmp_path, prompts=prompts))
        return made[-1]

    yield make
    with engine.connect() as connection:
        for bodies in made:
            assert check_accounting(connection, bodies.story.run.run_id) == []


@pytest.fixture
def bodies(make: Callable[[int], StoredBodies]) -> StoredBodies:
    return make(1)


@pytest.fixture
def finished(make: Callable[[int], StoredBodies]) -> StoredBodies:
    """Five complete groups."""
    bodies = make(5)
    bodies.finish()
    return bodies


def test_a_second_execution_leaves_the_accepted_trajectory_as_it_is(bodies):
    attempt = bodies.story.claim_one()
    accepted = bodies.execute(attempt, "right", reward=1.0)
    bodies.story.record(accepted)
    second = bodies.execute(attempt, "wrong", reward=0.0)
    assert bodies.story.record(second).duplicate == 1
    (rollout,) = bodies.connect().pull(0, ONE).rollouts()
    assert (rollout.reward, rollout.messages[0]["content"]) == (1.0, "right")


@pytest.mark.parametrize("spoil", [delete, cut, swap])
def test_a_group_that_cannot_be_read_is_dropped_and_another_takes_its_place(finished, spoil):
    spoil(finished.path(0))
    trainer = finished.connect()
    batch = trainer.pull(0, TWO)
    assert (texts(batch), batch.replayed) == (["answer 1", "answer 2"], False)
    assert finished.states() == ["unreadable", "leased", "leased", "ready", "ready"]
    (letter,) = finished.letters()
    assert (letter.kind, letter.label) == ("group", f"{finished.story.run.slug}-g000000")
    assert str(finished.path(0)) in letter.reason
    events = finished.story.rows(
        "SELECT from_state, to_state, entity_id FROM events"
        " WHERE run_id = :run_id AND reason = 'unreadable' AND to_state = 'dropped'"
    )
    dropped = finished.story.groups()[0]["group_id"]
    assert events == [{"from_state": "leased", "to_state": "dropped", "entity_id": dropped}]
    assert trainer.pull(0, TWO).groups == batch.groups
    assert trainer.commit(0) == 2


def test_too_few_readable_groups_are_waited_for_and_the_others_stay_ready(make):
    bodies = make(2)
    bodies.finish()
    bodies.story.add(range(2, 3))
    delete(bodies.path(0))
    with pytest.raises(NotReady):
        bodies.connect().pull(0, TWO)
    assert bodies.states() == ["unreadable", "ready", "open"]
    bodies.finish()
    assert texts(bodies.connect().pull(0, TWO)) == ["answer 1", "answer 2"]


def test_a_run_whose_last_groups_cannot_be_read_is_drained(make):
    bodies = make(2)
    bodies.finish()
    delete(bodies.path(0))
    cut(bodies.path(1))
    with pytest.raises(NotReady) as error:
        bodies.connect().pull(0, TWO, timeout_s=30)
    assert error.value.drained
    assert bodies.states() == ["unreadable", "unreadable"]


def test_a_batch_that_was_handed_out_does_not_change(finished):
    trainer = finished.connect()
    trainer.pull(0, TWO)
    path = finished.path(1)
    content = path.read_bytes()
    delete(path)
    with pytest.raises(UnreadableBody, match=r"-g000001.*rollout drop group") as error:
        trainer.pull(0, TWO)
    assert error.value.code == "E208"
    assert finished.states() == ["leased", "leased", "ready", "ready", "ready"]
    path.write_bytes(content)
    assert texts(trainer.pull(0, TWO)) == ["answer 0", "answer 1"]
    delete(path)
    trainer.abandon(0, reason="unreadable")
    assert texts(trainer.pull(0, TWO)) == ["answer 0", "answer 2"]
    assert finished.states() == ["leased", "unreadable", "leased", "ready", "ready"]


def test_of_two_processes_of_a_consumer_none_drops_what_the_other_has(finished):
    """The second one reads the batch while the first one has found a group unreadable."""
    path, store = finished.path(0), finished.payloads
    content = path.read_bytes()
    delete(path)
    found, go_on = threading.Event(), threading.Event()

    class Slow(FolderPayloads):
        def find(self, prefix: str) -> Iterator[str]:
            found.set()
            assert go_on.wait(30)
            return super().find(prefix)

    finished.payloads = Slow(path.parents[2])
    slow = finished.connect()
    finished.payloads = store
    batches: list[list[str]] = []
    thread = threading.Thread(target=lambda: batches.append(texts(slow.pull(0, TWO))))
    thread.start()
    assert found.wait(30)
    path.write_bytes(content)
    batches.append(texts(finished.connect().pull(0, TWO)))
    go_on.set()
    thread.join(30)
    assert batches == [["answer 0", "answer 1"]] * 2
    assert "unreadable" not in finished.states()


def test_no_transaction_is_open_while_trajectories_are_read(finished):
    engine, run = finished.story.engine, finished.story.run
    payloads = WatchedPayloads(finished.path(0).parents[2], engine)
    delete(finished.path(0))
    finished.payloads = payloads
    assert texts(finished.connect().pull(0, TWO)) == ["answer 1", "answer 2"]
    assert payloads.reads > 3
    payloads.reads = 0
    lines = list(export_lines(engine, run, payloads=payloads))
    assert [bool(line["messages"]) for line in lines] == [False, True, True, True, True]
    assert payloads.reads == 5


def test_a_store_that_does_not_answer_costs_no_group(finished):
    folder, away = finished.path(0).parents[2], finished.path(0).parents[2].with_name("away")
    folder.rename(away)
    trainer = finished.connect()
    for _ in range(2):
        with pytest.raises(ServiceUnavailable, match="has no trajectory of run") as error:
            trainer.pull(0, TWO)
        assert error.value.code == "E203"
    shutil.copytree(away, folder)
    assert texts(trainer.pull(0, TWO)) == ["answer 0", "answer 1"]
    assert finished.letters() == []


def test_an_inline_trajectory_of_another_execution_is_dropped_too(engine):
    story = StoredRun(engine, prompts=3, n=1, n_min=1)
    story.record(*(story.succeeded(attempt) for attempt in story.claim()))
    swap = """
        UPDATE trajectories SET body = 'x' FROM rollouts r
        WHERE r.rollout_id = trajectories.rollout_id AND r.group_no = 0
    """
    transact(engine, lambda c: c.execute(text(swap)))
    batch = TrainerClient(engine, run=story.run.slug).pull(0, TWO)
    assert [group.group_no for group in batch.groups] == [1, 2]


def test_a_group_whose_object_was_restored_can_be_made_ready_again(finished):
    path = finished.path(0)
    content = path.read_bytes()
    delete(path)
    trainer = finished.connect()
    assert texts(trainer.pull(0, TWO)) == ["answer 1", "answer 2"]
    path.write_bytes(content)
    (letter,) = finished.letters()
    engine = finished.story.engine
    assert transact(engine, lambda c: redrive(c, letter.dead_letter_id)) == "ready again"
    assert texts(trainer.pull(1, TWO)) == ["answer 0", "answer 3"]
    with pytest.raises(NotAllowed, match="not made ready again"):
        transact(engine, lambda c: redrive(c, letter.dead_letter_id))


def test_an_operator_drops_a_group_that_is_ready_or_leased_and_no_other(finished):
    engine = finished.story.engine
    groups = [group["group_id"] for group in finished.story.groups()]
    trainer = finished.connect()
    trainer.pull(0, TWO)
    trainer.commit(0)
    trainer.pull(1, TWO)
    for group_no in (2, 4):
        transact(engine, lambda c, group_no=group_no: drop_group(c, groups[group_no]))
    for group_no, why in ((0, "consumed"), (4, "dropped")):
        with pytest.raises(NotAllowed, match=why):
            transact(engine, lambda c, group_no=group_no: drop_group(c, groups[group_no]))
    assert finished.states() == ["consumed", "consumed", "operator", "leased", "operator"]
    assert texts(trainer.pull(1, TWO)) == ["answer 3"]
    transact(engine, lambda c: drop_group(c, groups[3]))
    with pytest.raises(NotReady) as error:
        trainer.pull(1, TWO)
    assert error.value.drained
