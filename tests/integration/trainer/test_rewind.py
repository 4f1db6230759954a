"""Whatever a trainer goes back to, no group is lost and none is trained twice in the history that
stays."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine, event

from pipeline.contract.errors import InputError, NotAllowed
from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.store.accounting import check_accounting
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.train_batch import TrainBatch

TWO = BatchSpec(groups=2)
#: The full campaign has 1,000 (docs/reliability.md).
CRASHES = int(os.environ.get("TEST_CRASHES", "100"))
PLACES = (
    "in the transaction of a pull",
    "after a pull",
    "after training",
    "after a checkpoint",
    "in the transaction of a commit",
    "after a commit",
)
LATER = ("replay", "ready", "afresh")


@pytest.fixture
def story(engine: Engine) -> Iterator[StoredRun]:
    """Six complete groups; the books balance in the end."""
    story = StoredRun(engine, prompts=6, n=2)
    complete(story)
    yield story
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def complete(story: StoredRun) -> None:
    while claimed := story.claim():
        story.record(*(story.succeeded(each, float(each.rollout_index)) for each in claimed))


def trainer_of(story: StoredRun, consumer: str = "a", *, lease_s: float = 3600.0) -> TrainerClient:
    return TrainerClient(story.engine, run=story.run.slug, consumer=consumer, lease_s=lease_s)


def numbers(batch: TrainBatch) -> list[int]:
    return [group.group_no for group in batch.groups]


def states(story: StoredRun) -> list[str]:
    return [group["state"] for group in story.groups()]


@pytest.fixture
def committed(story: StoredRun) -> TrainerClient:
    """Three steps were trained and committed."""
    trainer = trainer_of(story)
    for step in range(3):
        trainer.pull(step, TWO)
    trainer.commit(2, checkpoint_uri="file:///c2")
    return trainer


def test_later_groups_are_ready_again_after_a_rewind_and_the_history_has_no_gap(story, committed):
    resumed = committed.resume(committed_step=0, later="ready")
    assert (resumed.next_step, resumed.replay, resumed.groups_returned) == (1, (), 4)
    assert states(story) == ["consumed"] * 2 + ["ready"] * 4
    assert committed.resume(committed_step=0, later="ready").groups_returned == 0
    assert numbers(trainer_of(story, "b").pull(0, TWO)) == [2, 3]
    again = committed.pull(1, TWO)
    assert (numbers(again), again.replayed) == ([4, 5], False)
    assert committed.commit(1) == 2
    assert [step for step, _ in committed._steps()] == [0, 1, 2]


def test_later_prompts_are_tried_afresh_after_a_rewind(story, committed):
    resumed = committed.resume(committed_step=1, later="afresh")
    assert (resumed.next_step, resumed.groups_returned) == (2, 2)
    assert states(story) == ["consumed"] * 4 + ["dropped"] * 2 + ["open"] * 2
    reasons = [group["drop_reason"] for group in story.groups()]
    assert reasons[4:6] == ["rewound", "rewound"]
    complete(story)
    assert numbers(committed.pull(2, TWO)) == [6, 7]
    assert committed.commit(2) == 2


def test_a_rewind_by_default_gives_the_same_batches_again(story, committed):
    resumed = committed.resume(committed_step=0)
    assert (resumed.replay, resumed.groups_returned) == ((1, 2), 0)
    assert numbers(committed.pull(1, TWO)) == [2, 3]
    assert states(story) == ["consumed"] * 6


def test_a_rewind_to_the_start_leaves_other_consumers_alone(story):
    one, other = trainer_of(story), trainer_of(story, "b")
    one.pull(0, TWO)
    other.pull(0, TWO)
    other.commit(0)
    assert one.resume(committed_step=None, later="ready").groups_returned == 2
    assert states(story) == ["ready"] * 2 + ["consumed"] * 2 + ["ready"] * 2


def test_an_unknown_choice_changes_nothing(story, committed):
    with pytest.raises(InputError, match="replay, ready or afresh"):
        committed.resume(committed_step=0, later="drop")
    assert states(story) == ["consumed"] * 6


def test_the_next_version_after_a_rewind_is_above_those_before(committed):
    committed.publish_policy(7)
    assert committed.resume(committed_step=0, later="ready").policy_version == 7


# --- leases while a step trains


def test_a_pull_and_a_renewal_keep_the_earlier_steps_of_a_consumer(story):
    idle = trainer_of(story, lease_s=0.0)
    idle.pull(0, TWO)
    busy = trainer_of(story)
    busy.pull(1, BatchSpec(groups=4))
    with pytest.raises(NotReady, match="6 groups are leased to other consumers"):
        trainer_of(story, "b").pull(0, TWO)
    assert idle.renew() == 2  # for no time at all
    assert busy.renew() == 2
    with pytest.raises(NotReady):
        trainer_of(story, "b").pull(0, TWO)
    assert busy.commit(1) == 6


# --- crashes


class Crash(Exception):
    """The trainer's process ended here."""


class Trainer:
    """A trainer that crashes, comes back from a checkpoint of any age, and goes on.

    A checkpoint is the history that it contains: the groups of each step, in order.
    """

    def __init__(self, story: StoredRun, consumer: str, chance: random.Random) -> None:
        self.story, self.consumer, self.chance = story, consumer, chance
        self.checkpoints: dict[int, dict[int, list[UUID]]] = {}
        self.crashes: Counter[str] = Counter()
        self.lost_checkpoints = 0

    def live(self, *, crash: str | None) -> bool:
        """Go on until a crash, or to the end; return whether the run has no more groups."""
        lease_s = 0.0 if crash and self.chance.random() < 0.4 else 3600.0
        client = trainer_of(self.story, self.consumer, lease_s=lease_s)
        try:
            step, history = self.come_back(client, rewinds=crash is not None)
            steps = self.chance.randint(1, 3) if crash else 1000
            for number in range(steps):
                is_last = number == steps - 1
                self.train(client, step, history, crash if is_last else None)
                step += 1
        except Crash:
            assert crash is not None
            self.crashes[crash] += 1
        except NotReady as error:
            return error.drained
        except NotAllowed as error:
            # Its lease ran out. It goes back to a checkpoint, as after a crash.
            self.crashes[f"refused by {error.code}"] += 1
        finally:
            client._listener.close()
        return False

    def come_back(
        self, client: TrainerClient, *, rewinds: bool
    ) -> tuple[int, dict[int, list[UUID]]]:
        """Resume from the newest checkpoint that still counts, or from an older one by chance."""
        while True:
            step = max(self.checkpoints, default=None)
            later = "replay"
            if rewinds and self.chance.random() < 0.3:
                step = self.chance.choice([None, *self.checkpoints])
                later = self.chance.choice(LATER)
            try:
                resumed = client.resume(committed_step=step, later=later)
            except NotAllowed:
                # Another consumer took over a step that the checkpoint contains.
                self.lost_checkpoints += 1
                del self.checkpoints[max(self.checkpoints)]
                continue
            after = -1 if step is None else step
            self.checkpoints = {k: v for k, v in self.checkpoints.items() if k <= after}
            return resumed.next_step, dict(self.checkpoints.get(after, {}))

    def train(
        self,
        client: TrainerClient,
        step: int,
        history: dict[int, list[UUID]],
        crash: str | None,
    ) -> None:
        with crashing(self.story.engine, crash == "in the transaction of a pull"):
            # Who asks for many takes over what others hold on a lease that ran out.
            batch = client.pull(step, BatchSpec(groups=self.chance.choice((2, 2, 2, 16))))
        self.maybe(crash, "after a pull")
        history[step] = [group.group_id for group in batch.groups]
        self.maybe(crash, "after training")
        self.checkpoints[step] = dict(history)
        self.maybe(crash, "after a checkpoint")
        with crashing(self.story.engine, crash == "in the transaction of a commit"):
            client.commit(step)
        self.maybe(crash, "after a commit")

    def maybe(self, crash: str | None, place: str) -> None:
        if crash == place:
            raise Crash


@contextmanager
def crashing(engine: Engine, crashes: bool) -> Iterator[None]:
    """Let the next transaction end before its commit."""

    def end(_: object) -> None:
        raise Crash

    if not crashes:
        yield
        return
    event.listen(engine, "commit", end)
    try:
        yield
    finally:
        event.remove(engine, "commit", end)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1])
def test_no_group_is_lost_and_none_trained_twice_whatever_crashes(engine, seed):
    chance = random.Random(seed)
    story = StoredRun(engine, prompts=24, n=2)
    complete(story)
    trainers = [Trainer(story, name, chance) for name in ("left", "right")]
    while sum(sum(each.crashes.values()) for each in trainers) < CRASHES:
        is_over = chance.choice(trainers).live(crash=chance.choice(PLACES))
        complete(story)
        if is_over:
            # All is trained: one of them goes back to the start, in one of the ways.
            each = chance.choice(trainers)
            each.checkpoints.clear()
            trainer_of(story, each.consumer).resume(committed_step=None, later=chance.choice(LATER))
            complete(story)
    while not all([each.live(crash=None) for each in trainers]):
        complete(story)
    crashes = sum((each.crashes for each in trainers), Counter())
    lost = sum(each.lost_checkpoints for each in trainers)
    print(f"seed {seed}: {sum(crashes.values())} crashes, {lost} checkpoints lost: {dict(crashes)}")
    assert set(PLACES) <= set(crashes) <= {*PLACES, "refused by E133"}
    assert lost, "no step was taken over"
    the_history_is_whole(story, trainers)
    with engine.connect() as connection:
        assert check_accounting(connection, story.run.run_id) == []


def the_history_is_whole(story: StoredRun, trainers: list[Trainer]) -> None:
    stored: dict[str, dict[int, list[UUID]]] = {each.consumer: {} for each in trainers}
    for row in story.rows(
        "SELECT consumer, trainer_step, group_id FROM train_batches JOIN train_batch_groups"
        " USING (batch_id) WHERE run_id = :run_id AND state = 'committed'"
        " ORDER BY consumer, trainer_step, position"
    ):
        stored[row["consumer"]].setdefault(row["trainer_step"], []).append(row["group_id"])
    for each in trainers:
        last = max(each.checkpoints, default=-1)
        # What the last checkpoint was trained on is what the store says, without a gap.
        assert list(stored[each.consumer]) == list(range(last + 1))
        assert stored[each.consumer] == each.checkpoints.get(last, {})
    trained = Counter(group for steps in stored.values() for ids in steps.values() for group in ids)
    assert set(trained.values()) == {1}, "a group was trained twice"
    groups = story.groups()
    assert set(trained) == {g["group_id"] for g in groups if g["state"] == "consumed"}
    left = Counter(g["drop_reason"] for g in groups if g["state"] != "consumed")
    assert set(left) <= {"rewound"}, "a group was lost"
    # Each prompt was trained in exactly one of its groups.
    prompts = Counter(g["prompt_id"] for g in groups if g["state"] == "consumed")
    assert set(prompts.values()) == {1}
    assert len(prompts) == 24
