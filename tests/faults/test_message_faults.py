"""Messages twice, late, out of order; a rollout that kills its workers. C11, C12."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from benchmarks.faults import controller, worker
from benchmarks.faults.deployment import Deployment
from benchmarks.faults.invariants import find_violations
from benchmarks.faults.plugin import expected_reward
from benchmarks.faults.runs import FaultRun
from faults.rules import MANY, PATIENCE_S, judge
from pipeline.contract.trajectory import digest_of
from pipeline.queue.claim_checks import find_outcomes
from pipeline.queue.frames import decode_completions


def test_messages_that_come_twice_late_and_out_of_order_change_nothing(deployment: Deployment):
    figures = judge(say_everything_twice(deployment, mode="inline"))
    assert figures.failed == 0


# One broker is enough: the objects of two executions are no messages.
@pytest.mark.parametrize("deployments", ["redis"], indirect=True)
def test_no_reward_of_one_execution_meets_the_trajectory_of_another(deployment: Deployment):
    run = say_everything_twice(deployment, mode="object")
    figures = judge(run)
    assert figures.failed == 0
    assert figures.repeated, "no rollout was executed twice"
    assert_another_executions_trajectory_is_seen(run)


def say_everything_twice(deployment: Deployment, *, mode: str) -> FaultRun:
    """Run with a controller and workers that send each message twice; return the ended run."""
    settings = {"ROLLOUT_PAYLOADS__MODE": mode}
    before = deployment.controllers + deployment.workers
    deployment.add_controller({controller.TWICE_VARIABLE: "1", **settings})
    for _ in range(deployment.size.workers):
        deployment.add_worker({worker.TWICE_VARIABLE: "2", **settings})
    for member in before:
        deployment.fleet.retire(member)
    deployment.wait_ready()
    run = FaultRun(deployment, groups=MANY, name="twice")
    run.wait_executions_end(timeout_s=PATIENCE_S)
    return run


def assert_another_executions_trajectory_is_seen(run: FaultRun) -> None:
    """Put the object of a second execution in the place of the accepted one, then judge again."""
    payloads = run.deployment.payloads()
    query = """
        SELECT body_uri, :slug || '-g' || lpad(r.group_no::text, 6, '0') || '-r' || r.rollout_index
               || '-a' || r.winner_attempt_no AS label
        FROM trajectories t JOIN rollouts r
            ON r.rollout_id = t.rollout_id AND r.winner_attempt_no = t.attempt_no
        WHERE r.run_id = :run_id
    """
    for row in run.rows(query, slug=run.slug):
        uris = {str(c.body_uri) for c in find_outcomes(run.run_id, row.label, payloads)}
        if others := uris - {row.body_uri}:
            break
    else:
        raise AssertionError("no attempt has the objects of two executions")
    swapped = Path(urlsplit(others.pop()).path).read_bytes()
    Path(urlsplit(row.body_uri).path).write_bytes(swapped)
    violations = find_violations(run.evidence())
    assert [violation.partition(":")[0] for violation in violations] == ["I12"]
    # Without the digest, as in earlier versions, the executions still differ.
    with run.deployment.engine.begin() as connection:
        connection.execute(
            text("UPDATE trajectories SET body_digest = :digest WHERE body_uri = :uri"),
            {"digest": digest_of(decode_completions(swapped)[0][0].body), "uri": row.body_uri},
        )
    (violation,) = find_violations(run.evidence())
    assert "has the reward of execution" in violation


def test_a_rollout_that_kills_its_workers_is_quarantined(deployment: Deployment):
    poison = 2
    run = FaultRun(
        deployment,
        groups=4,
        name="poison",
        harms={poison: {"harm": "kill_worker"}},
        max_lost=2,
        n=2,
    )
    judge(run)
    evidence = run.evidence()
    executions = evidence.starts()
    name = f"{run.slug}-g{poison:06d}-r0"
    # Two workers die; then two processes of its own, as `max_lost` says. One worker more dies where
    # a worker ended before it had acknowledged the request, which then came again.
    assert executions.pop(name) in (4, 5), losses(run)
    # Its neighbours were in those workers at most.
    assert max(executions.values()) <= 4, losses(run)
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
