"""The trajectories that readers get: those of the execution whose reward was accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.messages import Completion
from pipeline.contract.train_batch import BatchSpec
from pipeline.contract.trajectory import TrajectoryRecord, pack_record
from pipeline.queue.claim_checks import check_out
from pipeline.queue.payloads import FolderPayloads
from pipeline.store.accounting import check_accounting
from pipeline.store.rollouts import ClaimedAttempt
from pipeline.trainer.client import TrainerClient

ONE = BatchSpec(groups=1, min_group_size=1)


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


@pytest.fixture
def bodies(engine: Engine, tmp_path: Path) -> Iterator[StoredBodies]:
    """One prompt of one rollout; the books balance in the end."""
    bodies = StoredBodies(engine, tmp_path, prompts=1)
    yield bodies
    with engine.connect() as connection:
        assert check_accounting(connection, bodies.story.run.run_id) == []


def test_a_second_execution_leaves_the_accepted_trajectory_as_it_is(bodies):
    attempt = bodies.story.claim_one()
    accepted = bodies.execute(attempt, "right", reward=1.0)
    bodies.story.record(accepted)
    second = bodies.execute(attempt, "wrong", reward=0.0)
    assert bodies.story.record(second).duplicate == 1
    (rollout,) = bodies.connect().pull(0, ONE).rollouts()
    assert (rollout.reward, rollout.messages[0]["content"]) == (1.0, "right")
