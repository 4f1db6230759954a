"""The main job on every broker: prompts in, complete groups out, each once."""

from __future__ import annotations

import signal

import pytest

from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.queue.broker import broker_of
from pipeline.queue.payloads import open_payloads
from pipeline.trainer.client import TrainerClient

PROMPTS, N = 12, 4


def test_every_prompt_becomes_a_group_that_the_trainer_gets_once(deploy, broker_place, policy_url):
    deployment = deploy(broker_place, llm={"base_url": policy_url})
    controller = deployment.start_controller()
    workers = [deployment.start_worker(), deployment.start_worker()]
    deployment.submit(PROMPTS, n=N, agent="react", tools=("calculator",), model="offline-policy")
    deployment.wait_states({"succeeded": PROMPTS * N})

    assert {row["reward"] for row in deployment.rows("SELECT reward FROM rollouts")} == {1.0}
    (stored,) = deployment.rows(
        "SELECT count(*) AS rows, count(DISTINCT rollout_id) AS rollouts FROM trajectories"
    )
    assert stored == {"rows": PROMPTS * N, "rollouts": PROMPTS * N}
    # Refused calls were repeated within their attempt: none was used up.
    assert {row["attempt_no"] for row in deployment.rows("SELECT * FROM attempts")} == {1}
    assert not deployment.rows("SELECT * FROM dead_letters")

    assert drained(deployment) == list(range(PROMPTS))
    for process in (*workers, controller):
        process.send(signal.SIGTERM)
    assert [process.wait_end() for process in (*workers, controller)] == [0, 0, 0]
    broker = broker_of(deployment.settings)
    with broker.connect() as connection:
        assert broker.depth(connection, "rollouts") == 0


def drained(deployment) -> list[int]:
    """Pull and commit everything in batches of four; return the group numbers in order."""
    payloads = open_payloads(deployment.settings)
    trainer = TrainerClient(deployment.engine, run="job", payloads=payloads)
    numbers: list[int] = []
    for step in range(PROMPTS // 4):
        batch = trainer.pull(step, BatchSpec(groups=4))
        assert all(len(group.rollouts) == N for group in batch.groups)
        assert all(rollout.messages for rollout in batch.rollouts())
        numbers += [group.group_no for group in batch.groups]
        trainer.commit(step)
    with pytest.raises(NotReady) as done:
        trainer.pull(step + 1, BatchSpec(groups=4))
    assert done.value.drained
    return sorted(numbers)
