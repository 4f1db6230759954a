"""Messages twice, late, out of order; a rollout that kills its workers. C11, C12."""

from benchmarks.faults import controller, worker
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.plugin import expected_reward
from benchmarks.faults.runs import FaultRun
from faults.rules import judge


def test_messages_that_come_twice_late_and_out_of_order_change_nothing(deployment: Deployment):
    before = deployment.controllers + deployment.workers
    deployment.add_controller({controller.TWICE_VARIABLE: "1"})
    for _ in range(deployment.size.workers):
        deployment.add_worker({worker.TWICE_VARIABLE: "2"})
    for member in before:
        deployment.fleet.retire(member)
    deployment.wait_ready()
    run = FaultRun(deployment, groups=16, name="twice")
    figures = judge(run)
    assert figures.failed == 0


def test_a_rollout_that_kills_its_workers_is_quarantined(deployment: Deployment):
    poison = 2
    run = FaultRun(
        deployment,
        groups=4,
        name="poison",
        deeds={poison: {"deed": "kill_worker"}},
        max_lost=2,
        n=2,
    )
    judge(run)
    evidence = run.evidence()
    executions = evidence.starts()
    name = f"{run.slug}-g{poison:06d}-r0"
    # Two workers die; then two processes of its own, as `max_lost` says.
    assert executions.pop(name) == 4, losses(run)
    # Its neighbours were in those workers at most.
    assert max(executions.values()) <= 3, losses(run)
    for rollout in evidence.rollouts:
        if (rollout["group_no"], rollout["rollout_index"]) == (poison, 0):
            assert (rollout["state"], rollout["error_class"]) == ("failed", "poison")
        else:
            assert rollout["state"] == "succeeded", losses(run)
            assert rollout["reward"] == expected_reward(rollout["name"])
    listed = run.rows("SELECT label FROM dead_letters WHERE run_id = :run_id AND kind = 'rollout'")
    assert [label.rpartition("-a")[0] for (label,) in listed] == [f"{run.slug}-g{poison:06d}-r0"]


def losses(run: FaultRun) -> str:
    """Return what became of each attempt of rollouts that were tried again."""
    query = (
        "SELECT r.group_no, r.rollout_index, a.attempt_no, a.state, a.worker_id, a.phase,"
        " a.error_code, a.dispatched_at, a.started_at, a.ended_at"
        " FROM attempts a JOIN rollouts r USING (rollout_id)"
        " WHERE r.run_id = :run_id AND r.attempt_no > 1 ORDER BY a.ended_at"
    )
    return "\n".join(" ".join(map(str, row)) for row in run.rows(query))
