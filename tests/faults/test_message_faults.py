"""Messages twice, late, out of order, or none at all: the outcome is the same. C11, C12."""

import random
from collections import Counter

from rules import judge

from benchmarks.faults import controller, injections, worker
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.plugin import expected_reward
from benchmarks.faults.runs import FaultRun


def test_messages_that_come_twice_late_and_out_of_order_change_nothing(deployment: Deployment):
    for member in deployment.workers:
        deployment.fleet.retire(member)
    for member in deployment.controllers:
        deployment.fleet.retire(member)
    deployment.add_controller(once={controller.TWICE_VARIABLE: "1"})
    for _ in range(deployment.size.workers):
        deployment.add_worker(once={worker.TWICE_VARIABLE: "2"})
    deployment.wait_ready()
    run = FaultRun(deployment, groups=16, name="twice")
    figures = judge(run)
    assert figures.failed == 0


def test_undecodable_messages_are_put_aside_and_harm_no_neighbour(
    deployment: Deployment, seeded: random.Random
):
    run = FaultRun(deployment, groups=8, name="garbage")
    run.wait_done(0.1)
    before = dead_letters(run)
    injections.send_garbage(deployment, seeded)
    figures = judge(run)
    assert figures.failed == 0
    assert figures.repeated == 0
    garbage = len(injections.GARBAGE)
    expected = {
        "completion": garbage,
        "heartbeat": garbage,
        "request": len(injections.NO_REQUESTS),
    }
    deployment.wait_until(
        lambda: dead_letters(run) - before == expected, what=f"{expected}", timeout_s=20
    )


def test_a_rollout_that_kills_its_workers_is_quarantined(deployment: Deployment):
    poison = 2
    run = FaultRun(
        deployment,
        groups=6,
        name="poison",
        deeds={poison: {"deed": "kill_worker"}},
        max_lost=3,
        n=2,
    )
    judge(run)
    for rollout in run.evidence().rollouts:
        if (rollout["group_no"], rollout["rollout_index"]) == (poison, 0):
            assert (rollout["state"], rollout["error_class"]) == ("failed", "poison")
        else:
            assert rollout["state"] == "succeeded", rollout
            assert rollout["reward"] == expected_reward(rollout["name"])
    listed = run.rows("SELECT label FROM dead_letters WHERE run_id = :run_id AND kind = 'rollout'")
    assert [label.rpartition("-a")[0] for (label,) in listed] == [f"{run.slug}-g{poison:06d}-r0"]


def dead_letters(run: FaultRun) -> Counter[str]:
    query = "SELECT kind, count(*) FROM dead_letters WHERE kind <> 'rollout' GROUP BY kind"
    return Counter({kind: count for kind, count in run.rows(query)})
