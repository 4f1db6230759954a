"""Running workers learn of a published policy, on every broker."""

from __future__ import annotations

from fixtures.scripted_model import scripted_model
from fixtures.waiting import wait_until

from pipeline.queue.broker import broker_of
from pipeline.trainer.client import TrainerClient


def test_a_rollout_under_way_goes_on_with_the_published_endpoints(deployment):
    with scripted_model(lambda _: "old") as old, scripted_model(lambda _: "new") as new:
        deployment.start_controller()
        deployment.start_worker()
        deployment.submit(1, agent="calling", base_url=old.base_url)
        trainer = TrainerClient(deployment.engine, run="job")
        wait_until(lambda: old.requests, 60, seen=deployment.picture)
        trainer.publish_policy(4, endpoints=new.base_url)
        if not broker_of(deployment.settings).has_remote_control:
            # Without remote control the next request tells the worker.
            deployment.submit(2, agent="calling", base_url=old.base_url)
        wait_until(lambda: new.requests, 60, seen=deployment.picture)
        trainer.publish_policy(4, mode="pause")
        trainer.publish_policy(5)
        deployment.gate.touch()
        wait_until(lambda: set(deployment.states()) == {"succeeded"}, 60, seen=deployment.picture)
    (first, *_) = deployment.rows(
        "SELECT version_min, version_max FROM attempts ORDER BY dispatched_at LIMIT 1"
    )
    assert first["version_min"] == 0
    assert first["version_max"] in (4, 5)


def test_nothing_is_dispatched_while_the_policy_is_paused(deployment):
    with scripted_model(lambda _: "7") as model:
        deployment.submit(1, agent="calling", base_url=model.base_url)
        trainer = TrainerClient(deployment.engine, run="job")
        trainer.publish_policy(1, mode="pause")
        deployment.gate.touch()
        deployment.start_controller()
        deployment.start_worker()
        assert deployment.states() == {"queued": 1}
        trainer.publish_policy(2)
        deployment.wait_states({"succeeded": 1})
    (attempt,) = deployment.rows("SELECT version_min, version_max FROM attempts")
    assert attempt == {"version_min": 2, "version_max": 2}
