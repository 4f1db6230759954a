"""Rewards of ours for trajectories of remote sessions, given by real workers on each broker."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fixtures.agentcore_runtime import Buckets, make_buckets, serving, set_environment
from fixtures.brokers import BrokerPlace
from fixtures.deployment import SHORT_LEASES, Deployment
from fixtures.waiting import wait_until

from pipeline.contract.train_batch import BatchSpec, NotReady
from pipeline.queue.payloads import open_payloads
from pipeline.store.accounting import check_accounting
from pipeline.store.engine import transact
from pipeline.store.runs import get_run
from pipeline.trainer.client import TrainerClient

#: Waits for a gate, so that its worker can be killed while it scores.
REWARD = """
import time
from pathlib import Path
from rollout import register_reward

folder = Path(__file__).parent

@register_reward("ours")
def ours(response, answer):
    with open(folder / "scored", "a") as file:
        print(answer, file=file)
    while not (folder / "scores").exists():
        time.sleep(0.02)
    return 0.5 if response == f"#### {answer}" else 0.0
"""


#: By group. The sessions of the last one wait, so that messages are read meanwhile.
SIZES = (0, 150_000, 400_000, 0)
EARLY, ALL = 2 * len(SIZES) - 2, 2 * len(SIZES)


class Sessions:
    """A container with sessions that answer right, and claim a reward that is none of theirs."""

    def __init__(self, buckets: Buckets) -> None:
        from workers.agentcore import AgentCoreRLApp

        self.buckets = buckets
        self.invoked: list[int] = []
        self.may_end = threading.Event()
        self.app = AgentCoreRLApp()
        self.app.rollout_entrypoint(self._answer)

    def _answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        group_no = int(payload["answer"]) - 1
        self.invoked.append(group_no)
        if group_no == len(SIZES) - 1:
            self.may_end.wait(60)
        answer = {"role": "assistant", "content": f"#### {payload['answer']}"}
        messages = [{"role": "user", "content": payload["prompt"]}, answer]
        turn = {"formatted_request": {"messages": messages}}
        # Trajectories that travel in messages, in requests by reference, and always by reference.
        padding = os.urandom(SIZES[group_no]).hex()
        return {"rollout_data": [turn], "rewards": 0.9, "padding": padding}

    def announce_again(self) -> None:
        """Announce all results once more."""
        keys = self.buckets.keys()
        for key in keys:
            named = {"bucket": {"name": self.buckets.bucket}, "object": {"key": key}}
            body = json.dumps({"Records": [{"s3": named}]})
            self.buckets.client("sqs").send_message(
                QueueUrl=self.buckets.queue_url, MessageBody=body
            )

    def unread(self) -> int:
        """Return the number of messages that are in the queue, received or not."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.buckets.client("sqs").get_queue_attributes(
            QueueUrl=self.buckets.queue_url, AttributeNames=names
        )
        return sum(int(found["Attributes"][name]) for name in names)


@pytest.fixture
def sessions(aws_url: str) -> Iterator[Sessions]:
    buckets = make_buckets(aws_url)
    with set_environment(buckets.environment):
        yield Sessions(buckets)


@pytest.fixture
def remote(
    deploy: Callable[..., Deployment],
    broker_place: BrokerPlace,
    sessions: Sessions,
    redis_url: str,
    tmp_path: Any,
) -> Deployment:
    """A deployment with a reward of its own."""
    plugin = tmp_path / "our_rewards.py"
    plugin.write_text(REWARD)
    aws = {"region": "us-west-2", "endpoint_url": sessions.buckets.url}
    return deploy(
        broker_place,
        **SHORT_LEASES,
        aws={**broker_place.aws, **aws},
        limits={"redis_url": redis_url},
        worker={"plugins": [str(plugin)]},
    )


def submit(remote: Deployment, sessions: Sessions, url: str) -> None:
    target = {
        "target": url,
        "results_bucket": sessions.buckets.bucket,
        "results_queue_url": sessions.buckets.queue_url,
    }
    remote.submit(len(SIZES), agent="agentcore", agentcore=target, reward="ours", n=2)


def scored(remote: Deployment) -> int:
    path = remote.folder / "scored"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_worker_that_dies_while_it_scores_costs_no_session_and_no_app_reward_is_ever_seen(
    remote: Deployment, sessions: Sessions
) -> None:
    remote.start_controller()
    doomed = remote.start_worker()
    with serving(sessions.app) as url:
        submit(remote, sessions, url)
        wait_until(lambda: scored(remote) == EARLY, 60, what="scoring", seen=remote.picture)
        doomed.send(signal.SIGKILL)
        doomed.wait_end()
        # No worker scores now: the results come a second time, and a trainer looks for groups.
        sessions.announce_again()
        wait_until(lambda: sessions.unread() == 0, 30, what="an empty queue of results")
        rows = remote.rows("SELECT reward, unscored_no FROM rollouts ORDER BY group_no")
        assert [row["unscored_no"] for row in rows] == [1] * EARLY + [None] * 2
        assert {row["reward"] for row in rows} == {None}
        trainer = TrainerClient(remote.engine, run="job", payloads=open_payloads(remote.settings))
        with pytest.raises(NotReady):
            trainer.pull(0, BatchSpec(groups=1))
        sessions.may_end.set()
        remote.start_worker()
        (remote.folder / "scores").touch()
        remote.wait_states({"succeeded": ALL})
        batch = trainer.pull(0, BatchSpec(groups=len(SIZES)))
        trainer.close()
    rewards = [rollout.reward for group in batch.groups for rollout in group.rollouts]
    assert rewards == [0.5] * ALL
    assert len(sessions.invoked) == ALL, "one session for each rollout"
    assert scored(remote) == EARLY + ALL, "each was scored by the second worker"
    assert {row["attempts_used"] for row in remote.rows("SELECT * FROM rollouts")} == {1}
    lost = remote.rows("SELECT attempt_no FROM attempts WHERE state = 'lost'")
    assert [row["attempt_no"] for row in lost] == [2] * EARLY
    kept = remote.rows("SELECT rollout_id FROM trajectories")
    assert len(kept) == ALL, "each trajectory is stored once"
    run = transact(remote.engine, lambda c: get_run(c, "job"))
    assert transact(remote.engine, check_accounting, run.run_id) == []
