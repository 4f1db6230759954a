"""Workers that die, freeze, or are told to stop."""

from __future__ import annotations

import os
import signal

import pytest
from fixtures.deployment import LEASE_S, SHORT_LEASES
from fixtures.waiting import wait_until

from pipeline.queue.broker import broker_of

#: From the death of a worker until its work runs elsewhere, at most: the promise of the project.
RECOVERY_S = LEASE_S + 5.0
#: SQS hands messages to a dead connection, and hides them for the visibility timeout.
RECOVERY_SQS_S = RECOVERY_S + 25.0


def labels(count: int, attempt_no: int = 1) -> list[str]:
    return [f"job-g00000{number}-r0-a{attempt_no}" for number in range(count)]


def recovery_s(deployment) -> float:
    return RECOVERY_SQS_S if broker_of(deployment.settings).kind == "sqs" else RECOVERY_S


def wait_lost(deployment, count: int = 1) -> None:
    wait_until(
        lambda: len(deployment.rows("SELECT * FROM attempts WHERE state = 'lost'")) == count,
        recovery_s(deployment),
        what=f"{count} lost attempts",
        seen=deployment.picture,
    )


def test_work_of_a_killed_worker_runs_again_within_lease_and_five_seconds(hasty):
    hasty.start_controller()
    doomed, other = hasty.start_worker(), hasty.start_worker()
    hasty.submit(6)
    hasty.wait_states({"running": 6})
    (held,) = hasty.rows(
        f"SELECT count(*) AS n FROM attempts WHERE worker_id LIKE '%-{doomed.pid}-%'"
    )
    doomed.kill()
    wait_until(
        lambda: len(hasty.said("started")) == 6 + held["n"],
        recovery_s(hasty),
        what="its work to run again",
        seen=hasty.picture,
    )
    hasty.gate.touch()
    hasty.wait_states({"succeeded": 6})
    again = hasty.rows("SELECT worker_id FROM attempts WHERE attempt_no = 2")
    assert len(again) == held["n"]
    assert all(f"-{other.pid}-" in attempt["worker_id"] for attempt in again)
    (lost,) = hasty.rows("SELECT sum(lost_count) AS n FROM rollouts")
    assert lost == held


def test_what_a_killed_worker_had_finished_is_not_run_again(hasty):
    hasty.start_controller()
    doomed = hasty.start_worker()
    hasty.gate.touch()
    hasty.submit(3)
    hasty.wait_states({"succeeded": 3})
    hasty.gate.unlink()
    hasty.submit(5)
    hasty.wait_states({"succeeded": 3, "running": 2})
    doomed.kill()
    hasty.gate.touch()
    hasty.start_worker()
    hasty.wait_states({"succeeded": 5})
    started = [label for label in hasty.said("started") if label[:11] in FINISHED]
    assert sorted(started) == labels(3)


FINISHED = {label[:11] for label in labels(3)}


def test_a_worker_told_to_stop_finishes_what_runs(deployment):
    deployment.start_controller()
    worker = deployment.start_worker()
    deployment.submit(3)
    deployment.wait_states({"running": 3})
    worker.send(signal.SIGTERM)
    wait_until(lambda: deployment.rows("SELECT * FROM processes WHERE stopping"))
    deployment.gate.touch()
    assert worker.wait_end() == 0
    deployment.wait_states({"succeeded": 3})
    assert sorted(deployment.said("started")) == labels(3)


@pytest.mark.parametrize("drain_s", [0.5, 0])
def test_what_is_not_done_in_time_is_handed_back_and_costs_no_attempt(deployment, drain_s):
    deployment.start_controller()
    worker = deployment.start_worker(drain_s=drain_s)
    deployment.submit(3, max_attempts=1)
    deployment.wait_states({"running": 3})
    worker.send(signal.SIGTERM)
    assert worker.wait_end() == 0
    assert sorted(deployment.said("stopped")) == labels(3)
    deployment.start_worker()
    deployment.gate.touch()
    deployment.wait_states({"succeeded": 3})
    rows = deployment.rows("SELECT attempts_used, lost_count FROM rollouts")
    assert rows == [{"attempts_used": 1, "lost_count": 0}] * 3


# The faults of workers freeze one on each broker; what the store keeps is the same on all.
@pytest.mark.parametrize("broker_place", ["redis"], indirect=True)
def test_the_late_result_of_a_frozen_worker_is_kept_and_changes_nothing(hasty):
    hasty.start_controller()
    frozen = hasty.start_worker()
    hasty.submit(1)
    hasty.wait_states({"running": 1})
    frozen.send(signal.SIGSTOP)
    wait_lost(hasty)
    hasty.gate.touch()
    hasty.start_worker()
    hasty.wait_states({"succeeded": 1})
    before = hasty.rows("SELECT * FROM rollouts")
    assert before[0]["winner_attempt_no"] > 1
    frozen.send(signal.SIGCONT)
    wait_until(
        lambda: hasty.rows("SELECT * FROM trajectories WHERE attempt_no = 1"),
        seen=hasty.picture,
    )
    assert hasty.rows("SELECT * FROM rollouts") == before
    (late,) = hasty.rows("SELECT state FROM attempts WHERE attempt_no = 1")
    assert late == {"state": "superseded"}


def test_a_worker_is_told_to_stop_an_attempt_that_is_no_longer_wanted(hasty, broker_place):
    if broker_place.kind == "sqs":
        pytest.skip("SQS has no remote control: the attempt ends by its deadline and is fenced")
    hasty.start_controller()
    frozen = hasty.start_worker()
    hasty.submit(1)
    hasty.wait_states({"running": 1})
    frozen.send(signal.SIGSTOP)
    wait_lost(hasty)
    frozen.send(signal.SIGCONT)
    wait_until(lambda: labels(1)[0] in hasty.said("stopped"), seen=hasty.picture)
    assert not hasty.said("answered")


def test_a_rollout_that_kills_its_workers_becomes_poison_and_its_neighbours_succeed(
    redis_place, deploy
):
    deployment = deploy(
        redis_place,
        **{**SHORT_LEASES, "worker": {"concurrency": 1}},
    )
    deployment.start_controller()
    deployment.submit(3, agent="deadly", max_lost=2)
    for _ in range(2):
        assert deployment.start_worker().wait_end() == 139
    deployment.start_worker()
    deployment.wait_states({"succeeded": 2, "failed": 1})
    (failed,) = deployment.rows("SELECT * FROM rollouts WHERE state = 'failed'")
    assert (failed["error_class"], failed["reward"]) == ("poison", None)
    (letter,) = deployment.rows("SELECT kind, reason FROM dead_letters")
    assert letter["kind"] == "rollout"


#: Plug-ins with which a thread of the worker fails as soon as the gate is open.
_FAILS = """
from pathlib import Path
from {module} import {owner}
def fail(self):
    if Path({gate!r}).exists():
        raise LookupError("a bug in this thread")
    return unharmed(self)
unharmed, {owner}.{method} = {owner}.{method}, fail
"""


@pytest.mark.parametrize(
    ("thread", "module", "owner", "method"),
    [
        ("heartbeats", "workers.process.heartbeats", "RejectedMessages", "waiting"),
        ("outbox", "workers.process.outbox", "Outbox", "_gather"),
    ],
)
@pytest.mark.parametrize("broker_place", ["redis"], indirect=True)
def test_a_worker_ends_loudly_when_one_of_its_threads_fails(
    hasty, tmp_path, thread, module, owner, method
):
    plugin = tmp_path / "fails.py"
    values = {"module": module, "owner": owner, "method": method, "gate": str(hasty.gate)}
    plugin.write_text(_FAILS.format(**values))
    hasty.start_controller()
    worker = hasty.start_worker(plugins=[*hasty.settings.worker.plugins, str(plugin)])
    hasty.submit(2)
    hasty.wait_states({"running": 2})
    hasty.gate.touch()
    assert worker.wait_end(LEASE_S) == os.EX_SOFTWARE
    end = worker.tail()
    assert f'thread "{thread}"' in end
    assert "LookupError: a bug in this thread" in end
    # The rollouts of the failed worker run again elsewhere.
    hasty.start_worker()
    hasty.wait_states({"succeeded": 2})
