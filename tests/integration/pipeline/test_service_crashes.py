"""Controllers that die at the worst moment: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import pytest
from fixtures.deployment import DIE_BEFORE_ACK, DIE_BEFORE_COMMIT, DIE_BEFORE_PUBLISH, LEASE_S

PROMPTS, N = 5, 2


def check_each_stored_once(deployment) -> None:
    (found,) = deployment.rows(
        "SELECT count(*) AS rows, count(DISTINCT rollout_id) AS rollouts FROM trajectories"
    )
    assert found == {"rows": PROMPTS * N, "rollouts": PROMPTS * N}
    groups = deployment.rows("SELECT state, n_succeeded FROM groups")
    assert groups == [{"state": "ready", "n_succeeded": N}] * PROMPTS


@pytest.mark.parametrize("moment", [DIE_BEFORE_ACK, DIE_BEFORE_COMMIT], ids=["ack", "commit"])
def test_a_collector_killed_before_its_ack_or_commit_loses_and_doubles_nothing(deployment, moment):
    deployment.gate.touch()
    deployment.start_controller("dispatcher")
    deployment.start_worker()
    dying = deployment.start_controller("collector", dies=moment)
    deployment.submit(PROMPTS, n=N)
    assert dying.wait_end() == 9
    deployment.start_controller("collector", "reconciler")
    deployment.wait_states({"succeeded": PROMPTS * N})
    check_each_stored_once(deployment)
    # Nothing was run again: what the dead collector held came back.
    assert len(deployment.said("started")) == PROMPTS * N


def test_a_dispatcher_killed_between_commit_and_publish_is_made_good(hasty):
    hasty.gate.touch()
    hasty.start_worker()
    hasty.submit(PROMPTS, n=N)
    dying = hasty.start_controller("dispatcher", dies=DIE_BEFORE_PUBLISH)
    assert dying.wait_end() == 9
    assert hasty.states() == {"dispatched": PROMPTS * N}
    hasty.start_controller()
    # Orphans are found by the empty queue, long before their lease runs out.
    hasty.wait_states({"succeeded": PROMPTS * N}, timeout_s=LEASE_S + 25)
    check_each_stored_once(hasty)
    assert {row["attempt_no"] for row in hasty.rows("SELECT * FROM rollouts")} == {2}


def test_a_whole_controller_killed_in_the_middle_goes_on_where_it_was(deployment):
    controller = deployment.start_controller()
    deployment.start_worker()
    deployment.submit(PROMPTS, n=N)
    deployment.wait_states({"running": PROMPTS * N})
    controller.kill()
    deployment.gate.touch()
    deployment.start_controller()
    deployment.wait_states({"succeeded": PROMPTS * N})
    check_each_stored_once(deployment)
    assert len(deployment.said("started")) == PROMPTS * N
